"""Request ids of prefill-first requests: they carry the addresses of both workers.

    cmpl-___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID
    cmpl-___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID-NUMBER      of one of a request's prompts

The form is that of vLLM's peer-to-peer design for disaggregated serving. HOST is a name, an IPv4 address or an IPv6
address in brackets; UUID is 32 hexadecimal digits; vLLM appends the prompt's number. An id is a claim, not a
permission: workers compare its addresses with discovery, and only leases and keys decide who may touch whose KV.
"""

from __future__ import annotations

import re
import uuid

import msgspec

from kvrelay.core.handoff import FIRST_PREFIX, HandoffId
from kvrelay.errors import ProtocolError

FIRST_NUMBER = 2 * FIRST_PREFIX
"""Numbers of paired hand-offs begin here, beyond those of prefixes and far beyond those that a decode worker counts."""
MAX_LENGTH = 1024
SCHEME = "tcp://"

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
_ADDRESS = rf"{_HOST}:[1-9][0-9]{{0,4}}"
_FORM = re.compile(
    rf"(cmpl|chatcmpl)-___prefill_addr_({_ADDRESS})___decode_addr_({_ADDRESS})_([0-9a-f]{{32}})(?:-(0|[1-9][0-9]{{0,3}}))?",
    re.ASCII,
)


class PairId(msgspec.Struct, frozen=True):
    """A parsed id. Addresses are ``tcp://HOST:PORT``, as in discovery. ``prompt``: its number, if the id has one."""

    prefix: str
    prefill_address: str
    decode_address: str
    unique: uuid.UUID
    prompt: int | None = None

    def __str__(self) -> str:
        prefill, decode = (text.removeprefix(SCHEME) for text in (self.prefill_address, self.decode_address))
        suffix = "" if self.prompt is None else f"-{self.prompt}"
        return f"{self.prefix}-___prefill_addr_{prefill}___decode_addr_{decode}_{self.unique.hex}{suffix}"

    def handoff_id(self, decode_worker_id: str) -> HandoffId:
        """The name under which both workers know the hand-off."""
        number = self.unique.int + (self.prompt or 0)
        return HandoffId(decode_worker_id, FIRST_NUMBER | (number & (FIRST_NUMBER - 1)))


def new_pair_id(prefix: str, prefill_address: str, decode_address: str) -> PairId:
    """An id that no other request has. Raises ProtocolError for an address that the form cannot carry."""
    return parse_pair_id(str(PairId(prefix, prefill_address, decode_address, uuid.uuid4())))


def parse_pair_id(text: str) -> PairId:
    """Raises ProtocolError for everything that is not exactly of the form."""
    match = _FORM.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise ProtocolError(f"{text[:80]!r} is not a request id with the addresses of a pair")
    prefix, prefill, decode, unique, prompt = match.groups()
    for address in (prefill, decode):
        if int(address.rpartition(":")[2]) > 65535:
            raise ProtocolError(f"{address} has no valid port")
    return PairId(prefix, SCHEME + prefill, SCHEME + decode, uuid.UUID(unique), None if prompt is None else int(prompt))
