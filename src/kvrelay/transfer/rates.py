"""What moving KV costs, per token and peer, from a transfer thread's counts. Pure.

A cost is seconds from submission to end, waiting included, over the tokens moved: what a hand-off sees, not what the
link could carry alone. It follows about the last ten samples of a peer in which something was moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.core.events import MAX_TRANSFER_PEERS, TransferCost
from kvrelay.transfer.stats import PeerTransferStats

SHARE = 0.2
"""Weight of the latest sample."""


class TransferRates:
    """The costs of one worker's transfers. ``token_bytes``: of KV, for one token."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._counted: dict[str, tuple[int, float]] = {}
        self._token_s: dict[str, float] = {}
        """The peer of the latest transfer last."""
        self.relative_error = 0.0
        """Mean of the last samples' |measured - estimated| / measured."""

    def update(self, peers: Iterable[PeerTransferStats]) -> tuple[TransferCost, ...]:
        """Take in a snapshot of the counts. Returns the costs of the peers that were used last, at most
        MAX_TRANSFER_PEERS."""
        totals: dict[str, tuple[int, float]] = {}
        for peer in peers:
            # Counts of departed workers are kept under an empty name.
            if peer.worker_id:
                num_bytes, seconds = totals.get(peer.worker_id, (0, 0.0))
                totals[peer.worker_id] = num_bytes + peer.num_bytes, seconds + peer.seconds
        for name, (num_bytes, seconds) in totals.items():
            bytes_before, seconds_before = self._counted.get(name, (0, 0.0))
            if num_bytes > bytes_before and seconds > seconds_before:
                moved = (num_bytes - bytes_before) / self._token_bytes
                self._add(name, (seconds - seconds_before) / moved)
        self._counted = totals
        self._token_s = {name: value for name, value in self._token_s.items() if name in totals}
        last = list(self._token_s.items())[-MAX_TRANSFER_PEERS:]
        return tuple(TransferCost(name, token_s) for name, token_s in last)

    def _add(self, name: str, measured_s: float) -> None:
        known_s = self._token_s.pop(name, None)
        if known_s is None:
            self._token_s[name] = measured_s
            return
        self.relative_error += SHARE * (min(abs(measured_s - known_s) / measured_s, 10.0) - self.relative_error)
        self._token_s[name] = known_s + SHARE * (measured_s - known_s)
