"""Checksums of KV blocks in the background: a thread that reads blocks while the engine computes others.

A checksum takes as long as a copy: too long for the engine's thread, for the transfer thread, which polls, and for the
event loop. This module owns the thread, which starts with the first block. The caller ensures that the blocks are not
written meanwhile, and acts on the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.core.checksums import find_damage
from kvrelay.engine.contract import EngineHost

_log = logging.getLogger(__name__)

OnComputed = Callable[[tuple[int, ...] | None], None]
OnVerified = Callable[[str | None], None]


class BlockChecksums:
    """Computes and verifies checksums of an engine's blocks, in the order of the calls.

    ``required``: this worker accepts no KV without checksums. Callbacks run on the checksum thread, never within the
    call.
    """

    def __init__(self, engine: EngineHost, *, required: bool) -> None:
        self.required = required
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def compute(self, block_ids: Sequence[int], on_done: OnComputed) -> None:
        """Calls ``on_done(checksums)`` with one per block, in order; with None if they could not be computed."""
        self._thread.submit(self._run, block_ids, on_done)

    def verify(
        self, block_ids: Sequence[int], sent: Sequence[int] | None, on_done: OnVerified, num_units: int | None = None
    ) -> None:
        """Calls ``on_done(None)`` if the blocks have the checksums in ``sent``, else ``on_done(reason)``.

        ``num_units``: only this many units of tokens have content; None: all.
        """

        def compare(found: tuple[int, ...] | None) -> None:
            damage = "it cannot be read" if found is None else find_damage(block_ids, sent, found[:num_units])
            on_done(damage)

        self.compute(block_ids, compare)

    async def of(self, block_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Like ``compute``, for the event loop. Returns at once if there are no blocks."""
        if not block_ids:
            return ()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, block_ids)

    def close(self) -> None:
        """Wait for the running computation; drop all later ones silently. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, block_ids: Sequence[int], on_done: OnComputed) -> None:
        checksums = self._compute(block_ids)
        try:
            on_done(checksums)
        except Exception:  # noqa: BLE001 - the outermost frame of this thread that is ours
            _log.exception("a callback of a checksum failed")

    def _compute(self, block_ids: Sequence[int]) -> tuple[int, ...] | None:
        try:
            return self._engine.checksum_blocks(block_ids)
        except Exception:  # noqa: BLE001 - whatever a device may raise: somebody waits for the answer
            _log.exception("%d blocks could not be read", len(block_ids))
            return None
