"""The answer of a look-up in an index, and the error of a store."""

from __future__ import annotations

from kvrelay.errors import KvrelayError


class WorkerGroup:
    """Workers that hold the same blocks. An index returns the same object again if it can, and a group equals only
    itself, so a caller can cache derived values by group without hashing the names."""

    __slots__ = ("names",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"WorkerGroup{self.names}"


class ParentNotFoundError(KvrelayError):
    """The parent in a stored event is a block that the worker does not hold: events were lost. Ask for a dump."""

    def __init__(self, worker_id: str, parent_hash: int) -> None:
        super().__init__(f"worker {worker_id} stored a block below {parent_hash:#018x}, which it does not hold")
        self.worker_id = worker_id
        self.parent_hash = parent_hash
