"""Raw gloo between two processes: one message after another, each waited for. p2p is measured by that.

The parent makes a peer process (``python -m benchmarks.raw_gloo``). Their rendezvous goes over its stdin and
stdout, one JSON object a line; the same lines then tell the peer what to receive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from kvrelay.bench.peer import Peer, say
from kvrelay.errors import TransferError
from kvrelay.transfer.p2p.pool_view import empty_bytes
from kvrelay.transfer.p2p.process_group import PairGroup, PairStore

_TIMEOUT_S = 60.0
_DATA, _DONE = 1, 2


class _Key(msgspec.Struct, tag=True):
    key: str
    value: bytes


class _Receive(msgspec.Struct, tag=True):
    size: int
    count: int


_decoder: msgspec.json.Decoder[_Key | _Receive] = msgspec.json.Decoder(_Key | _Receive)


class RawGloo:
    """The sending end."""

    def __init__(self, peer: Peer, max_size: int) -> None:
        self._peer = peer
        store = PairStore(lambda key, value: peer.tell(msgspec.json.encode(_Key(key, value))), _TIMEOUT_S)
        reading = threading.Thread(target=_store_keys, args=(peer.output, store), daemon=True)
        reading.start()
        self._group = PairGroup(store, 0, "cpu", _TIMEOUT_S)
        self._data = empty_bytes(max_size, "cpu", is_host=True).fill_(1)
        self._one = empty_bytes(1, "cpu", is_host=True)

    def move(self, size: int, total_bytes: int) -> float:
        """Seconds for ``total_bytes`` in messages of ``size``, until the peer has all of them."""
        count = total_bytes // size
        self._peer.tell(msgspec.json.encode(_Receive(size, count)))
        self._group.wait(self._group.receive(self._one, _DONE))
        data = self._data[:size]
        begin = time.perf_counter()
        for _ in range(count):
            self._group.wait(self._group.send(data, _DATA))
        self._group.wait(self._group.receive(self._one, _DONE))
        return time.perf_counter() - begin


@contextmanager
def raw_gloo(max_size: int) -> Iterator[RawGloo]:
    """Raises TransferError if the peer does not start."""
    with Peer("benchmarks.raw_gloo", str(max_size)) as peer:
        yield RawGloo(peer, max_size)


def _store_keys(pipe: IO[bytes], store: PairStore, then: Callable[[_Receive], None] | None = None) -> None:
    for line in pipe:
        message = _decoder.decode(line)
        if isinstance(message, _Key):
            store.receive(message.key, message.value)
        elif then is not None:
            then(message)
    store.close()


def _peer_main(max_size: int) -> None:
    say(b"ready")
    data = empty_bytes(max_size, "cpu", is_host=True).fill_(1)
    one = empty_bytes(1, "cpu", is_host=True).fill_(1)
    store = PairStore(lambda key, value: say(msgspec.json.encode(_Key(key, value))), _TIMEOUT_S)
    group: list[PairGroup] = []
    making = threading.Thread(target=lambda: group.append(PairGroup(store, 1, "cpu", _TIMEOUT_S)))
    making.start()

    def receive(order: _Receive) -> None:
        making.join()
        if not group:
            raise TransferError("the communicator could not be made")
        group[0].wait(group[0].send(one, _DONE))
        for _ in range(order.count):
            group[0].wait(group[0].receive(data[: order.size], _DATA))
        group[0].wait(group[0].send(one, _DONE))

    _store_keys(sys.stdin.buffer, store, receive)


if __name__ == "__main__":
    _peer_main(int(sys.argv[1]))
