"""The ids of prefill-first requests: what is written is read again, and nothing else is."""

from __future__ import annotations

import uuid

import pytest

from kvrelay.core.pair_id import FIRST_NUMBER, PairId, new_pair_id, parse_pair_id
from kvrelay.errors import ProtocolError

TEXT = f"cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{'0f' * 16}"


def test_an_id_carries_both_addresses() -> None:
    parsed = parse_pair_id(TEXT)
    assert parsed == PairId("cmpl", "tcp://10.0.1.2:21001", "tcp://10.0.1.3:22001", uuid.UUID("0f" * 16))
    assert str(parsed) == TEXT


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://loopback:10001", "tcp://p-0.prefill.svc:8000"]
)
@pytest.mark.parametrize("prefix", ["cmpl", "chatcmpl"])
def test_new_ids_differ_and_can_be_read(address: str, prefix: str) -> None:
    ids = [new_pair_id(prefix, address, "tcp://d:2") for _ in range(2)]
    assert ids[0] != ids[1]
    assert parse_pair_id(str(ids[0])) == ids[0]
    assert ids[0].handoff_id("d") == parse_pair_id(str(ids[0])).handoff_id("d")
    assert ids[0].handoff_id("d") != ids[1].handoff_id("d")
    assert FIRST_NUMBER <= ids[0].handoff_id("d").number < 2 * FIRST_NUMBER < 2**64


def test_the_number_that_servers_append_for_each_prompt() -> None:
    """vLLM names the prompts of a completions request ID-0, ID-1, ..."""
    first, second = parse_pair_id(f"{TEXT}-0"), parse_pair_id(f"{TEXT}-1")
    assert (str(first), str(second)) == (f"{TEXT}-0", f"{TEXT}-1")
    assert first.handoff_id("d") == parse_pair_id(TEXT).handoff_id("d")
    assert len({parse_pair_id(f"{TEXT}-{prompt}").handoff_id("d") for prompt in range(10)}) == 10
    last = parse_pair_id(f"{TEXT[:-32]}{'f' * 32}-9999").handoff_id("d")
    assert FIRST_NUMBER <= last.number < 2 * FIRST_NUMBER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cmpl-1",
        TEXT + "-",
        TEXT + "-00",
        TEXT + "-10000",
        TEXT + "-x",
        TEXT + "-0-0",
        TEXT + "0",
        TEXT[:-1],
        " " + TEXT,
        TEXT + "\n",
        TEXT.upper(),
        TEXT.replace("cmpl", "other"),
        TEXT.replace(":21001", ""),
        TEXT.replace(":21001", ":0"),
        TEXT.replace(":21001", ":99999"),
        TEXT.replace(":21001", ":2100１"),
        TEXT.replace("10.0.1.2", ""),
        TEXT.replace("10.0.1.2", "10.0.1.2/x"),
        TEXT.replace("10.0.1.2", "a_b"),
        TEXT.replace("10.0.1.2", "a" * 2000),
        TEXT.replace("___decode_addr_", "___prefill_addr_"),
        TEXT.replace("0f", "0g"),
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_pair_id(text)


def test_an_address_that_cannot_be_carried_is_refused() -> None:
    with pytest.raises(ProtocolError):
        new_pair_id("cmpl", "ipc:///tmp/socket", "tcp://d:2")
