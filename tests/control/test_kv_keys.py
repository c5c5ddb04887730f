"""Keys as NATS takes them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.control.nats.kv_keys import decode_key, encode_key

VALID = re.compile(r"[-_=.a-zA-Z0-9]+")


def test_a_level_of_our_keys_is_a_token() -> None:
    assert encode_key("kvrelay/default/workers/decode-1a2b") == "kvrelay.default.workers.decode-1a2b"
    assert encode_key("kvrelay/ns_2/kv_metadata/w/0") == "kvrelay.ns_2.kv_metadata.w.0"
    assert encode_key("kvrelay/n/config/disagg.size") == "kvrelay.n.config.disagg=2Esize"


def test_other_characters_and_empty_levels_are_escaped() -> None:
    assert encode_key("a b=*") == "a=20b=3D=2A"
    assert encode_key("/a//b/") == "=2Fa=2F=2Fb=2F"
    assert encode_key("/a") == "=2Fa"
    assert encode_key(".a") == "=2Ea"
    assert decode_key("kvrelay.=C3=BC") == "kvrelay/ü"


def test_keys_of_another_program_decode_without_an_error() -> None:
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
