"""Where the prefill of an arriving request runs, and the request's way into the engine. Simulated workers share it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvrelay.core.handoff import HandoffOrder
from kvrelay.engine.contract import Engine
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.placement.base import Decision, Objectives, PrefillLoad, PrefillPlace
from kvrelay.placement.cost import CostPlacement
from kvrelay.placement.threshold import DisaggPolicy


class Placing(msgspec.Struct, eq=False):
    """``prefill_load``: what the other side offers now. ``must_be_remote``: whether this engine cannot prefill, and
    another can."""

    _policy: DisaggPolicy
    _by_cost: CostPlacement
    _prefill_load: Callable[[], PrefillLoad]
    _must_be_remote: Callable[[], bool] = lambda: False

    def add_request(
        self, core: Engine, request: Request, order: HandoffOrder, objectives: Objectives, *, is_paired: bool
    ) -> PrefillPlace | None:
        """Where the prefill runs; None: that is decided when the request is admitted.

        ``request`` has a placement state. ``is_paired``: a prefill worker has its other half (prefill-first). Raises
        what ``Engine.add_request`` does.
        """
        state = request.placement
        assert state is not None
        if self._policy.is_by_cost and not self._must_be_remote():
            state.objectives = objectives
            state.refuses_late = self._policy.config.early_reject
            if order is HandoffOrder.DECODE_FIRST and not request.must_prefill_here:
                state.policy = self._by_cost
                core.add_request(request)
                return None
            state.otherwise = self._by_cost
        place = self._place_of(core, request, order, is_paired=is_paired)
        state.decision = Decision(place)
        if place is PrefillPlace.REMOTE:
            request.mode = PrefillMode.REMOTE
        core.add_request(request)
        return place

    def _place_of(self, core: Engine, request: Request, order: HandoffOrder, *, is_paired: bool) -> PrefillPlace:
        """Decided here (decode-first) or by the frontend (prefill-first)."""
        if self._must_be_remote():
            return PrefillPlace.REMOTE
        if order is HandoffOrder.PREFILL_FIRST and not request.must_prefill_here:
            return PrefillPlace.REMOTE if is_paired else PrefillPlace.LOCAL_UNPAIRED
        return self._policy.decide(
            prompt_length=len(request.token_ids),
            num_cached_tokens=core.num_cached_tokens(request),
            prefill_load=self._prefill_load(),
            must_be_local=request.must_prefill_here,
        )
