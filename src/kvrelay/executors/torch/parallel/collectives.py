"""Collectives of one rank: torch.distributed's process groups, made here and passed explicitly.

    tensor-parallel group     the ranks of one stage: sums of partial results, logits cut by vocabulary
    pipeline neighbours       the rank with the same tp_rank in the stage before and after
    experts                   all ranks of a data-parallel group: see ``parallel.experts``

There is no default group and no global state, so several engines can run in one process. Every collective has a
timeout. A collective that fails means that another rank has ended: PeerLostError.

Sums are taken in the order of the ranks over all-gathered parts on the CPU. Gloo's ring would sum in an order that
depends on the place in the tensor, and a token must not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.rendezvous import store_port
from kvrelay.errors import PeerLostError
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.parallel.rank_progress import RankProgress

# Its classes come from C++ and have no type declarations.
_dist: Any = torch.distributed


class Groups:
    """The ranks find each other by ``store``. ``muted``: collectives return a result of the right shape at once, for a
    rank that warms up alone."""

    def __init__(
        self, rank: ParallelRank, store: Any, device: torch.device, timeout_s: float, progress: RankProgress
    ) -> None:
        self.rank = rank
        self.device = device
        self._progress = progress
        self.is_muted = False
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._tp: Any = None
        self._world: Any = None
        if rank.tp_size > 1:
            self._tp = process_group(f"tp{rank.pp_rank}", store, rank.tp_rank, rank.tp_size, device, timeout_s)
        if rank.pp_size > 1:
            self._world = process_group("world", store, rank.index, rank.num_ranks, device, timeout_s)

    def connect(self) -> None:
        """Wait until all ranks have joined. Raises PeerLostError."""
        for group in (self._tp, self._world):
            if group is not None:
                self.wait(group.barrier)

    @contextmanager
    def muted(self) -> Iterator[None]:
        self.is_muted = True
        try:
            yield
        finally:
            self.is_muted = False

    def moving(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Run ``call``, counted as progress."""
        move = self._progress.move

        def counted(x: torch.Tensor) -> torch.Tensor:
            move()
            return call(x)

        return counted

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the stage's ranks, in ``x``'s memory."""
        group = self._tp
        if group is None or self.is_muted:
            return x
        if self.device.type != "cpu":
            self.wait(lambda: group.allreduce([x]))
            return x
        parts = [torch.empty_like(x) for _ in range(self.rank.tp_size)]
        self.wait(lambda: group.allgather([parts], [x.contiguous()]))
        if len(parts) == 2:
            return torch.add(parts[0], parts[1], out=x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """[R, ``num_columns``]: every rank's columns side by side, on the first rank of the stage. Elsewhere the result
        is undefined.

        All ranks but the last have equally many columns.
        """
        group, tp_size = self._tp, self.rank.tp_size
        if group is None:
            return x
        width = -(-num_columns // tp_size)
        padded = x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))
        if self.is_muted:
            return padded.repeat(1, tp_size)[:, :num_columns]
        padded = padded.contiguous()
        is_root = self.rank.tp_rank == 0
        parts = [torch.empty_like(padded) for _ in range(tp_size)] if is_root else []
        self.wait(lambda: group.gather(parts, padded, 0))
        return torch.cat(parts, dim=1)[:, :num_columns] if is_root else x

    def send(self, x: torch.Tensor) -> None:
        """Send ``x`` to the next stage; returns before it has arrived. ``x`` must not be changed any more."""
        if self.is_muted:
            return
        self._settle()
        target, group = self.rank.index + self.rank.tp_size, self._world
        self._sending.append((_checked(lambda: group.send([x], target, 0)), x))

    def receive(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width] float32 from the stage before."""
        x = torch.zeros(num_rows, width, dtype=torch.float32, device=self.device)
        if not self.is_muted:
            source, group = self.rank.index - self.rank.tp_size, self._world
            self.wait(lambda: group.recv([x], source, 0))
        return x

    def _settle(self) -> None:
        """Free the tensors that have been sent; wait for the oldest if the next stage is far behind."""
        while self._sending and (len(self._sending) >= 2 * self.rank.pp_size or self._sending[0][0].is_completed()):
            work, _ = self._sending.pop(0)
            self.wait(lambda work=work: work)  # type: ignore[misc]

    def wait(self, begin: Callable[[], Any]) -> None:
        """For the collective that ``begin`` starts. Raises PeerLostError."""
        with self._progress.waiting():
            _checked(lambda: begin().wait())


def _checked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as exc:
        raise PeerLostError(f"a collective failed: {str(exc).splitlines()[0]}") from exc


def file_store(path: str, num_ranks: int) -> Any:
    """The store by which the ranks find each other: a file that they share."""
    return _dist.FileStore(path, num_ranks)


def group_store(address: GroupAddress, *, is_host: bool, timeout_s: float) -> Any:
    """Where ranks of several hosts find each other: one of them serves it, at a free port, which it tells the others.
    Raises PeerLostError."""
    timeout = timedelta(seconds=timeout_s)
    if is_host:
        store = _checked(lambda: _dist.TCPStore(address.host, 0, None, True, timeout, wait_for_workers=False))
        store_port(address, store.port, timeout_s)
        return store
    port = store_port(address, 0, timeout_s)
    return _checked(lambda: _dist.TCPStore(address.host, port, None, False, timeout, wait_for_workers=False))


def process_group(
    name: str, store: Any, rank: int, size: int, device: torch.device, timeout_s: float, host: str = "127.0.0.1"
) -> Any:
    """A group of ``size`` ranks that meet in ``store``. ``host``: the address of this rank, for gloo."""
    timeout = timedelta(seconds=timeout_s)
    own = _dist.PrefixStore(name, store)
    if device.type == "cuda":
        nccl = _dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return _checked(lambda: _dist.ProcessGroupNCCL(own, rank, size, nccl))
    gloo = _dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._threads = 1
    gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    return _checked(lambda: _dist.ProcessGroupGloo(own, rank, size, gloo))
