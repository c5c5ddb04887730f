"""HandoffDone at the decode worker: from the notification behind the last write to a request that runs.

    transfer thread       engine thread                         checksum thread
    notified() ─────────> _arrived() ──no checksums──> _accept()
                              └──────checksums───────────────────> verify
                          _accept() or _reject()  <────────────────┘

While blocks are verified their grant stays open, so they stay quarantined: nobody else gets them, and the claimant, who
is done, writes no more. Blocks that changed on the way end the grant like any others; the request is computed here.
It does not know how a grant came about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvrelay.core.handoff import HandoffDone
from kvrelay.core.messages import decode_message
from kvrelay.engine.core import EngineCore
from kvrelay.engine.handoffs import Grant
from kvrelay.errors import ProtocolError
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.stats import DecodeStats

_log = logging.getLogger(__name__)


class Arrivals:
    """Takes in what prefill workers have written. ``on_end(handoff_id, generation)`` runs on the engine thread for each
    HandoffDone that was dealt with, whatever became of it."""

    def __init__(
        self,
        engine: EngineThread,
        checksums: BlockChecksums,
        stats: DecodeStats,
        on_end: Callable[[str, int], None],
    ) -> None:
        self._engine = engine
        self._checksums = checksums
        self._stats = stats
        self._on_end = on_end

    # -- transfer thread ----------------------------------------------------------------------------------------------

    def notified(self, payload: bytes) -> None:
        """The last write's notification has arrived. Whatever else ``payload`` may be is refused."""
        try:
            message = decode_message(payload)
        except ProtocolError as exc:
            _log.warning("notification refused: %s", exc)
            return
        if not isinstance(message, HandoffDone):
            _log.warning("notification refused: %s is not HandoffDone", type(message).__name__)
            return
        self._engine.post(lambda core: self._arrived(core, message))

    # -- engine thread ------------------------------------------------------------------------------------------------

    def _arrived(self, core: EngineCore, message: HandoffDone) -> None:
        grant = core.ledger.find_grant(message.handoff_id, message.generation)
        if grant is None or (message.checksums is None and not self._checksums.required):
            self._accept(core, message)
            return
        self._checksums.verify(grant.quarantined, message.checksums, partial(self._verified, message, grant))

    def _accept(self, core: EngineCore, message: HandoffDone, num_verified_blocks: int = 0) -> None:
        if core.remote_prefill_done(message):
            self._stats.num_remote_done += 1
            self._stats.num_received_bytes += message.num_transferred_bytes
            self._stats.num_verified_blocks += num_verified_blocks
        else:
            self._stats.num_stale += 1
        self._on_end(message.handoff_id, message.generation)

    def _reject(self, core: EngineCore, message: HandoffDone, grant: Grant, damage: str) -> None:
        if core.remote_prefill_damaged(message):
            self._stats.num_kv_checksum_mismatches += 1
            _log.warning("KV of hand-off %s from %s is refused: %s", message.handoff_id, grant.claimant, damage)
        else:
            self._stats.num_stale += 1
        self._on_end(message.handoff_id, message.generation)

    # -- checksum thread ----------------------------------------------------------------------------------------------

    def _verified(self, message: HandoffDone, grant: Grant, damage: str | None) -> None:
        if damage is None:
            self._engine.post(lambda core: self._accept(core, message, len(grant.quarantined)))
        else:
            self._engine.post(lambda core: self._reject(core, message, grant, damage))
