"""Keys as NATS takes them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.control.nats.kv_keys import decode_key, encode_key

VALID = re.compile(r"[-/_=.a-zA-Z0-9]+")


def test_our_own_keys_stay_as_they_are() -> None:
    for key in ("kvrelay/default/workers/decode-1a2b", "kvrelay/ns_2/kv_metadata/w/0", "kvrelay/n/config/disagg.size"):
        assert encode_key(key) == key


def test_the_rest_is_escaped() -> None:
    assert encode_key("a b=*") == "a=20b=3D=2A"
    assert encode_key(".a..b.") == "=2Ea=2E=2Eb=2E"
    assert decode_key("kvrelay/=C3=BC") == "kvrelay/ü"


def test_what_others_wrote_comes_back_somehow() -> None:
    assert decode_key("=FF") == "=FF"
    assert decode_key("a=zz") == "a=zz"


@given(st.text(min_size=1))
def test_every_key_comes_back(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        return
    encoded = encode_key(key)
    assert VALID.fullmatch(encoded)
    assert ".." not in encoded
    assert not encoded.startswith(".")
    assert not encoded.endswith(".")
    assert decode_key(encoded) == key
