"""Groups whose ranks are threads of the test's process: real sockets, real shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports

from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.member import GroupMember, Notice
from kvrelay.dp.messages import RankInfo
from kvrelay.dp.protocol import StepsUntil
from kvrelay.errors import KvrelayError

CARRIERS = ("shm", "rpc")
FACTS = {"model": "tiny", "version": "1"}


def address_for(carrier: str, directory: Path) -> GroupAddress:
    if carrier == "shm":
        return GroupAddress(directory=directory)
    return GroupAddress.parse(f"127.0.0.1:{free_ports(1)[0]}")


class Heard:
    """What one rank is told, in order."""

    def __init__(self, member: GroupMember) -> None:
        self.member = member
        self.notices: list[Notice] = []
        self._changed = threading.Condition()
        member.listen(self._take)

    def _take(self, notice: Notice) -> None:
        with self._changed:
            self.notices.append(notice)
            self._changed.notify_all()

    def wait_for(self, notice: Notice, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: notice in self.notices, timeout_s), self.notices

    def wait_for_kind(self, kind: type, timeout_s: float = 60.0) -> Notice:
        def found() -> list[Notice]:
            return [notice for notice in self.notices if isinstance(notice, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), timeout_s), self.notices
            return found()[0]

    @property
    def step(self) -> int:
        return max((notice.step for notice in self.notices if isinstance(notice, StepsUntil)), default=0)


def join_all(
    address: GroupAddress, infos: list[RankInfo], lookahead: int = 24, timeout_s: float = 60.0, silence_s: float = 60.0
) -> list[GroupMember | Exception]:
    """Each rank's member, or what its join has raised."""

    def join(info: RankInfo) -> GroupMember | Exception:
        try:
            return GroupMember.join(address, info, lookahead, timeout_s, silence_s)
        except KvrelayError as exc:
            return exc

    with ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(join, infos))


@contextmanager
def formed(
    carrier: str, directory: Path, num_ranks: int = 2, lookahead: int = 24, silence_s: float = 60.0
) -> Iterator[list[GroupMember]]:
    infos = [RankInfo(rank, num_ranks, f"place {rank}", FACTS) for rank in range(num_ranks)]
    joined = join_all(address_for(carrier, directory), infos, lookahead, silence_s=silence_s)
    members = [member for member in joined if isinstance(member, GroupMember)]
    try:
        assert len(members) == num_ranks, joined
        yield members
    finally:
        for member in reversed(members):
            member.close()
