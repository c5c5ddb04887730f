"""The two halves of a paired attempt (prefill-first), and the header that asks for it.

``PrefillHalf`` is the prefill worker's: its first token, and its failures for the other half. It ends with the first
token: from then on only the decode worker matters to the sequence. It does not decide who is paired with whom.

    submitted ──first token──> the sequence, at once
        └──refused, lost──> PrefillLost to the decode worker, which then prefills itself
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from kvrelay.core.handoff import HandoffOrder, OrderPolicy, Pair
from kvrelay.core.messages import GenerateRequest, RequestRefused, TokenOutput
from kvrelay.core.pair_id import new_pair_id
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.cluster.worker_link import WorkerLink

ORDER_HEADER = "x-kvrelay-order"
SEED_BITS = 63


def read_order(value: str | None, default: OrderPolicy) -> OrderPolicy:
    """The order that a request asks for in its header. Raises InvalidInputError."""
    if value is None:
        return default
    try:
        return OrderPolicy(value)
    except ValueError as exc:
        orders = ", ".join(OrderPolicy)
        raise InvalidInputError(f"{ORDER_HEADER} must be one of {orders}", param=ORDER_HEADER) from exc


def paired_request(
    request: GenerateRequest, prefill: WorkerInfo, decode: WorkerInfo, begins_within_s: float = 0.0
) -> GenerateRequest:
    """``request`` as the decode worker of a pair gets it; the prefill worker gets the same under its own ``worker_id``.

    Its new id carries both addresses. Raises ProtocolError for an address that no id can carry.
    """
    prefix = "chatcmpl" if request.request_id.startswith("chatcmpl") else "cmpl"
    pair_id = new_pair_id(prefix, prefill.address, decode.address)
    sampling = request.sampling
    if sampling.seed is None and not sampling.is_greedy:
        # Should the decode worker have to compute the first token again, it is to be the same one.
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(SEED_BITS))
    return msgspec.structs.replace(
        request,
        request_id=str(pair_id),
        sampling=sampling,
        order=HandoffOrder.PREFILL_FIRST,
        pair=Pair(prefill.worker_id, decode.worker_id, begins_within_s),
    )


class PrefillHalf:
    """Implements ``OutputReceiver``. ``on_first(output, now_s)`` gets the first token; ``on_end`` runs once, before it,
    when the prefill worker has nothing more to do for the sequence."""

    def __init__(
        self,
        link: WorkerLink,
        decode_link: WorkerLink,
        request_id: str,
        on_first: Callable[[TokenOutput, float], None],
        on_end: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self.link = link
        self._decode_link = decode_link
        self._request_id = request_id
        self._on_first = on_first
        self._on_end = on_end
        self._on_broken = on_broken
        self._is_ended = False

    def submit(self, paired: GenerateRequest) -> None:
        """Send the prefill worker its half of a paired request. Raises WorkerUnavailableError."""
        self.link.submit(msgspec.structs.replace(paired, worker_id=self.link.info.worker_id), self)

    def drop(self, *, abort: bool) -> None:
        """The sequence needs no first token from here any more. ``abort``: nor does the decode worker need the KV."""
        if self._is_ended:
            return
        if abort:
            self.link.abort(self._request_id)
        else:
            self.link.release(self._request_id)
        self._end()

    # -- what the prefill worker says ---------------------------------------------------------------------------------

    def deliver(self, output: TokenOutput, now_s: float) -> None:
        """Take the first token, or a failure."""
        if self._is_ended:
            return
        self.link.release(self._request_id)
        self._end()
        if output.finish_reason is FinishReason.ABORT or output.finish_reason is FinishReason.ERROR:
            self._decode_link.prefill_lost(self._request_id)
        else:
            self._on_first(output, now_s)

    def refused(self, refusal: RequestRefused) -> None:
        """What is wrong with the request itself, the decode worker finds out as well."""
        self._lost()

    def worker_lost(self, worker_id: str) -> None:
        self._lost()

    def broken(self) -> None:
        self._on_broken()

    def _lost(self) -> None:
        if not self._is_ended:
            self._end()
            self._decode_link.prefill_lost(self._request_id)

    def _end(self) -> None:
        self._is_ended = True
        self._on_end()
