"""A file of API keys that changes while the frontend runs."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.frontend.access.test_access import BODY, bearer
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, send

from kvrelay.cli.main import run
from kvrelay.config import KeyLimits
from kvrelay.errors import ConfigError
from kvrelay.http import keys_file
from kvrelay.http.api_keys import ApiKeys, KeyRevokedError, digest_of, new_api_key, read_keys_file
from kvrelay.http.keys_file import KeysFile

ALICE, ALICE_LINE = new_api_key("alice")
BOB, BOB_LINE = new_api_key("bob")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with Alice's and Bob's keys."""
    path = tmp_path / "keys"
    path.write_text(f"{ALICE_LINE}\n{BOB_LINE}\n")
    return path


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at without delay."""
    monkeypatch.setattr(keys_file, "POLL_INTERVAL_S", 0.002)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What has been logged since it was last asked for."""

    def read() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    with caplog.at_level(logging.WARNING, keys_file.__name__):
        yield read


def replace(path: Path, text: str) -> None:
    """As an editor or an orchestrator does: a new file in the old one's place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_changed_file_is_taken_over(path: Path, log: Callable[[], list[str]]) -> None:
    keys = ApiKeys.load("plain", str(path))
    changes: list[frozenset[str]] = []
    file = KeysFile(path, keys, lambda: changes.append(keys.names))
    file.poll()
    assert (changes, log()) == ([], [])

    carol, carol_line = new_api_key("carol", KeyLimits(max_prompt_tokens=5))
    replace(path, f"{BOB_LINE} max_prompt_tokens=7\n{carol_line}\n")
    file.poll()
    file.poll()
    assert keys.name_of(f"Bearer {ALICE}") is None
    assert keys.name_of(f"Bearer {BOB}") == "bob"
    assert keys.name_of(f"Bearer {carol}") == "carol"
    assert keys.name_of("Bearer plain") == "default"
    assert (keys.limits_of("bob").max_prompt_tokens, keys.limits_of("carol").max_prompt_tokens) == (7, 5)
    assert keys.limits_of("default") == KeyLimits()
    with pytest.raises(KeyRevokedError, match="revoked"):
        keys.limits_of("alice")
    assert changes == [{"default", "bob", "carol"}]
    assert log() == [f"loaded changed API keys from {path}: added: carol; removed: alice; changed: bob"]


def test_a_file_that_changed_while_the_process_started(path: Path) -> None:
    keys = ApiKeys.load("", str(path))
    replace(path, BOB_LINE)
    KeysFile(path, keys).poll()
    assert keys.names == {"bob"}


@pytest.mark.parametrize("text", ["", "# nobody\n", "alice:no-digest\n", f"{ALICE_LINE}\n{ALICE_LINE}\n", "\0" * 100])
def test_a_malformed_file_changes_nothing(path: Path, text: str, log: Callable[[], list[str]]) -> None:
    keys = ApiKeys.load("", str(path))
    file = KeysFile(path, keys)
    replace(path, text)
    for _ in range(3):
        file.poll()
    lines = log()
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert "stay unchanged" in lines[0]
    assert keys.names == {"alice", "bob"}
    replace(path, BOB_LINE)
    file.poll()
    assert keys.names == {"bob"}


def test_a_removed_file_changes_nothing_until_it_is_back(path: Path, log: Callable[[], list[str]]) -> None:
    keys = ApiKeys.load("", str(path))
    file = KeysFile(path, keys)
    file.poll()
    path.unlink()
    for _ in range(3):
        file.poll()
    lines = log()
    assert len(lines) == 1
    assert "cannot read API keys" in lines[0]
    assert keys.name_of(f"Bearer {ALICE}") == "alice"
    path.write_text(BOB_LINE)
    file.poll()
    assert keys.names == {"bob"}


def test_a_change_that_keeps_size_and_time_is_noticed(path: Path) -> None:
    keys = ApiKeys.load("", str(path))
    file = KeysFile(path, keys)
    file.poll()
    before = path.stat()
    replace(path, path.read_text().replace("bob", "ben"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    file.poll()
    assert keys.names == {"alice", "ben"}


def test_the_file_is_read_only_when_it_has_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    monkeypatch.setattr(keys_file, "read_keys_file", lambda path: reads.append(path) or {})
    file = KeysFile(path, ApiKeys({}, {}))
    for _ in range(5):
        file.poll()
    assert reads == [path]


@pytest.mark.usefixtures("often")
async def test_a_key_is_revoked_and_another_added_without_a_restart(model_dir: Path, path: Path) -> None:
    carol, carol_line = new_api_key("carol")
    async with running(model_dir, Script((10,)), api_keys_file=str(path), requests_per_minute=1) as cluster:
        port = cluster.frontend.port

        async def status_for(key: str) -> int:
            return (await send(port, "POST", "/v1/completions", BODY, bearer(key))).status

        assert [await status_for(key) for key in (ALICE, BOB, carol)] == [200, 200, 401]
        replace(path, f"{BOB_LINE}\n{carol_line}\n")
        async with asyncio.timeout(60):
            while await status_for(ALICE) != 401:
                await asyncio.sleep(0.002)
        assert [await status_for(key) for key in (BOB, carol)] == [429, 200]


@pytest.mark.usefixtures("often")
async def test_a_key_that_is_revoked_before_the_body_has_come(model_dir: Path, path: Path) -> None:
    """It was let in by its head; it must not go on without its limits."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n"
        f"expect: 100-continue\r\ncontent-length: 38\r\n\r\n"
    )
    async with running(model_dir, Script((10,)), api_keys_file=str(path)) as cluster:
        port = cluster.frontend.port
        client = await RawClient.connect(port)
        client.writer.write(head.encode())
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        replace(path, BOB_LINE)
        async with asyncio.timeout(60):
            while (await send(port, "GET", "/v1/models", headers=bearer(ALICE))).status != 401:
                await asyncio.sleep(0.002)
        client.writer.write(b'{"prompt": [5, 6], "max_tokens": 2}   ')
        answer = await client.read_answer()
        await client.close()
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert cluster.workers["w0"].requests == []


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The key that the command prints."""
    assert run(["api-key", *arguments]) == 0
    printed = capsys.readouterr().out
    (key,) = re.findall(r"^key:  (\S+)$", printed, re.MULTILINE)
    assert digest_of(key).hex() not in printed, "the line is in the file"
    return str(key)


@pytest.mark.parametrize(
    "before",
    [None, "", "# ours\n\n", f"{BOB_LINE}\n", BOB_LINE],
    ids=["no file", "empty", "comment", "line", "line without end"],
)
def test_a_new_key_goes_into_the_file(before: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "api-keys"
    if before is not None:
        path.write_text(before)
    key = made(capsys, "alice", "--max-prompt-tokens", "5", "--append", str(path))
    other = made(capsys, "carol", "--append", str(path))
    keys = ApiKeys({}, read_keys_file(path))
    assert [keys.name_of(f"Bearer {each}") for each in (key, other)] == ["alice", "carol"]
    assert keys.limits_of("alice").max_prompt_tokens == 5
    assert path.read_text().startswith(before or "")
    if before is None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    else:
        assert keys.names == {"alice", "carol"} | ({"bob"} if BOB_LINE in before else set())


@pytest.mark.parametrize(
    ("before", "reason"),
    [(f"{ALICE_LINE}\n", "has a key named alice"), (f"{BOB_LINE}\nnonsense\n", "line 2")],
    ids=["name is there", "malformed"],
)
def test_a_file_that_cannot_take_the_key_stays_as_it_is(
    before: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "api-keys"
    path.write_text(before)
    assert run(["api-key", "alice", "--append", str(path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, path.read_text()) == ("", before)
    assert reason in printed.err
    assert run(["api-key", "alice", "--append", str(tmp_path / "none" / "api-keys")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero: .*above 1,048,576 bytes"):
        read_keys_file(Path("/dev/zero"))
