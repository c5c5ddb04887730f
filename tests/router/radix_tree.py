"""RadixTree: the plain index, which defines the behaviour of an index of prefixes.

Each block is a node with its children by local hash and the set of workers that hold it; a table finds a worker's block
by its sequence hash. ``PrefixIndex`` does the same, faster, and is tested against this one. The tree does not know the
order of events, workers' registrations or load.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.router.indexer import KvIndexer
from kvrelay.router.overlap import ParentNotFoundError
from kvrelay.router.prefix_index import PrefixIndex


def scores_of(index: PrefixIndex | KvIndexer, sequence: Sequence[int]) -> dict[str, int]:
    """Per worker the number of leading blocks of ``sequence`` that it holds; workers with none are left out."""
    return {name: depth for depth, group in index.find_holders(sequence) for name in group.names}


class StoredByTokens(BlockStored, frozen=True, tag="BlockStored"):
    """With the hashes of each block's own tokens, by which the tree finds children."""

    local_hashes: tuple[int, ...] = ()


class _Node:
    """One block. The root is a node without a parent."""

    __slots__ = ("children", "local_hash", "parent", "sequence_hash", "workers")

    def __init__(self, parent: _Node | None, local_hash: int, sequence_hash: int) -> None:
        self.parent = parent
        self.local_hash = local_hash
        self.sequence_hash = sequence_hash
        self.children: dict[int, _Node] = {}
        self.workers: set[str] = set()


class RadixTree:
    """The tree of all workers' blocks."""

    def __init__(self) -> None:
        self._root = _Node(None, 0, 0)
        self._lookup: dict[str, dict[int, _Node]] = {}
        self._num_nodes = 0

    @property
    def num_blocks(self) -> int:
        """Nodes in the tree, including those kept only for the nodes below them."""
        return self._num_nodes

    def scores(self, sequence: Sequence[int]) -> dict[str, int]:
        """Walk down ``sequence`` (local hashes) while children match and a worker holds all blocks so far."""
        scores: dict[str, int] = {}
        node, active = self._root, None
        for depth, local_hash in enumerate(sequence, start=1):
            child = node.children.get(local_hash)
            if child is None:
                break
            node = child
            active = set(node.workers) if active is None else active & node.workers
            if not active:
                break
            scores.update(dict.fromkeys(active, depth))
        return scores

    def apply_event(self, worker_id: str, event: KvEvent) -> None:
        """Raises ParentNotFoundError (and changes nothing) if the worker does not hold the stored blocks' parent.

        Storing a stored block and removing an absent one change nothing.
        """
        if isinstance(event, StoredByTokens):
            self._store(worker_id, event)
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self._remove(worker_id, block)
        elif isinstance(event, AllBlocksCleared):
            self.clear_worker(worker_id)

    def clear_worker(self, worker_id: str) -> None:
        """The worker holds nothing any more."""
        for block in list(self._lookup.get(worker_id, ())):
            self._remove(worker_id, block)

    def blocks_of(self, worker_id: str) -> list[int]:
        return list(self._lookup.get(worker_id, ()))

    def _store(self, worker_id: str, event: StoredByTokens) -> None:
        blocks = self._lookup.setdefault(worker_id, {})
        node = self._root
        if event.parent_hash is not None:
            parent = blocks.get(event.parent_hash)
            if parent is None:
                raise ParentNotFoundError(worker_id, event.parent_hash)
            node = parent
        for sequence_hash, local_hash in zip(event.block_hashes, event.local_hashes, strict=True):
            child = node.children.get(local_hash)
            if child is None:
                child = node.children[local_hash] = _Node(node, local_hash, sequence_hash)
                self._num_nodes += 1
            node = child
            node.workers.add(worker_id)
            blocks[sequence_hash] = node

    def _remove(self, worker_id: str, sequence_hash: int) -> None:
        node = self._lookup.get(worker_id, {}).pop(sequence_hash, None)
        if node is None:
            return
        node.workers.discard(worker_id)
        while node.parent is not None and not node.workers and not node.children:
            del node.parent.children[node.local_hash]
            self._num_nodes -= 1
            node = node.parent
