"""The simulated frontend and its clients: arrivals, the real router, tokens, and requests that move to another worker.

The frontend is one server: it takes ``frontend_request_s`` for a request and ``frontend_token_s`` for a token, first
come, first served. N frontends are one server that is N times as fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.core.events import KvEventBatch, LoadMetrics
from kvrelay.core.handoff import HandoffId, HandoffOrder, OrderPolicy, RemotePrefillRequest
from kvrelay.core.messages import TokenOutput
from kvrelay.core.pair_id import FIRST_NUMBER
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError, WorkerUnavailableError
from kvrelay.handoff import decode_events as de
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.placement.ways import Ways
from kvrelay.planner import Traffic
from kvrelay.router import PairRouter, Router, RouterStage, RoutingRequest
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.decode_run import QuietDelivery
from kvrelay.simulate.loop import Position, Rank
from kvrelay.simulate.machine import TOKEN
from kvrelay.simulate.network import Network, Node
from kvrelay.simulate.result import RequestResult
from kvrelay.simulate.worker import Delivery, FrontendPort, Generate, SimulatedWorker, is_final


class _Flight(msgspec.Struct, eq=False):
    """A request on a worker. ``request_id`` is new for each attempt."""

    arrival: Arrival
    result: RequestResult
    prompt: list[int]
    sequence_hashes: tuple[int, ...]
    """Of the prompt's blocks."""
    request_id: str = ""
    worker_id: str = ""
    pair: tuple[str, HandoffId] | None = None
    """The prefill worker that has not given the first token yet, and the hand-off."""
    excluded: set[str] = msgspec.field(default_factory=set)
    num_attempts: int = 0


class Frontend:
    """Sends ``arrivals`` to the workers of ``network``, and notes when each token comes. ``on_over``: all requests have
    ended."""

    def __init__(self, network: Network, arrivals: Sequence[Arrival], on_over: Callable[[], None]) -> None:
        spec, clock = network.spec, network.loop.clock
        self._network, self._loop, self._arrivals = network, network.loop, arrivals
        self._request_s = network.costs.frontend_request_s / spec.frontends
        self._token_s = network.costs.frontend_token_s / spec.frontends
        self._on_over = on_over
        self._quiet: list[QuietDelivery] = []
        """On their way here, in no order."""
        self.port = FrontendPort(self._deliver, self._quiet.append, self._refused)
        self._router = Router(spec.router, spec.engine.block_size, clock)
        self.pairs: PairRouter | None = None
        if spec.order is not OrderPolicy.DECODE_FIRST:
            prefills = Router(spec.router, spec.engine.block_size, clock, RouterStage.PREFILL)
            self.pairs = PairRouter(self._router, prefills, DisaggPolicy(spec.disagg))
        self._routers = [self._router] if self.pairs is None else [self._router, self.pairs.prefills]
        self._free_at_s = 0.0
        self._flights: dict[str, _Flight] = {}
        self._gone: set[str] = set()
        """Workers to which no connection can be made, though their leases may not have ended."""
        self._num_open = len(arrivals)
        self._next: defaultdict[int, list[int]] = defaultdict(list)
        """Arrivals that wait for the end of another one."""
        self.results: list[RequestResult] = []
        self.traffic = Traffic()

    def start(self) -> None:
        """Plan all arrivals that wait for none."""
        for index, arrival in enumerate(self._arrivals):
            self.results.append(RequestResult(index, math.inf, arrival.prompt_tokens))
            if arrival.after is None:
                self._loop.at(arrival.time_s, lambda index=index: self._send(index))  # type: ignore[misc]
            else:
                self._next[arrival.after].append(index)
        if not self._arrivals:
            self._on_over()

    # -- discovery ----------------------------------------------------------------------------------------------------

    def listed(self, info: WorkerInfo) -> None:
        """A worker has registered, or changed its role. One that takes requests is no prefill half, though it may
        pull."""
        takes_requests = info.role.takes_requests
        for router in self._routers:
            if (router is self._router) is takes_requests:
                router.add_worker(info)
            else:
                router.remove_worker(info.worker_id)

    def unlisted(self, worker_id: str) -> None:
        """A worker has left discovery; its requests go on."""
        for router in self._routers:
            router.remove_worker(worker_id)

    def lost(self, worker_id: str) -> None:
        """The connection to a worker has ended: its requests move to others."""
        self.catch_up()
        self._gone.add(worker_id)
        for flight in list(self._flights.values()):
            if flight.worker_id == worker_id:
                self._move(flight, worker_id)
            elif flight.pair is not None and flight.pair[0] == worker_id:
                self._network.hop(flight.worker_id, _claimant_gone(flight.pair[1]))
                self._prefilled(flight)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _busy_until(self, seconds: float) -> float:
        """When the frontend has done ``seconds`` of work that comes now."""
        self._free_at_s = max(self._free_at_s, self._loop.clock.now()) + seconds
        return self._free_at_s

    def _send(self, index: int) -> None:
        self.catch_up()
        arrival, result = self._arrivals[index], self.results[index]
        result.sent_s = self._loop.clock.now()
        self.traffic.arrived(arrival.prompt_tokens)
        spec = self._network.spec
        prompt = arrival.prompt(index, spec.vocab_size)
        hashes = arrival.hashes(index, spec.vocab_size, spec.engine.block_size)
        flight = _Flight(arrival, result, prompt, hashes)
        self._loop.at(self._busy_until(self._request_s), lambda: self._route(flight))

    def _route(self, flight: _Flight) -> None:
        """Choose a worker or a pair, and send the request there."""
        self.catch_up()
        flight.num_attempts += 1
        flight.request_id = f"{flight.result.index}-{flight.num_attempts}"
        tokens = flight.prompt + [TOKEN] * len(flight.result.tokens_s)
        request = RoutingRequest(
            flight.request_id,
            tokens,
            flight.arrival.answer_tokens,
            flight.excluded | self._gone,
            sequence_hashes=None if flight.result.tokens_s else flight.sequence_hashes,
        )
        flight.pair = None
        prefill_id, ways = "", None
        try:
            if self.pairs is None:
                flight.worker_id = self._router.choose(request).worker_id
            else:
                decision = self.pairs.choose(request, self._network.spec.order, must_be_local=False)
                flight.worker_id, ways = decision.decode.worker_id, decision.ways
                if decision.prefill is not None:
                    prefill_id = decision.prefill.worker_id
        except WorkerUnavailableError as exc:
            self._end(flight, str(exc))
            return
        if prefill_id:
            number = FIRST_NUMBER | (flight.result.index << 8) | flight.num_attempts & 255
            flight.pair = (prefill_id, HandoffId(flight.worker_id, number))
        flight.result.worker_id = flight.worker_id
        self._flights[flight.request_id] = flight
        self._dispatch(flight, tokens, ways)

    def _dispatch(self, flight: _Flight, tokens: list[int], ways: Ways | None) -> None:
        num_output = len(flight.result.tokens_s)
        message = Generate(
            flight.request_id,
            flight.prompt,
            tokens[len(flight.prompt) :],
            flight.arrival.answer_tokens,
            flight.arrival.priority,
            self._network.spec.order.unpaired if flight.pair is None else HandoffOrder.PREFILL_FIRST,
            flight.pair,
            None if ways is None else ways.wait_s,
            0.0 if ways is None else ways.begins_within_s,
            None if num_output else flight.sequence_hashes,
        )
        hop_s, pair = self._network.costs.hop_s, flight.pair
        decode = self._worker(flight.worker_id)
        self._loop.after(hop_s, lambda: decode.generate(message))
        if pair is None:
            return
        half = RemotePrefillRequest(
            handoff_id=pair[1],
            decode_worker_id=flight.worker_id,
            request_id=flight.request_id,
            token_ids=tuple(tokens),
            num_output_tokens=num_output,
            sampling=message.sampling,
            block_ids=(),
            num_cached_tokens=0,
            priority=flight.arrival.priority,
        )
        prefill, request_id = self._worker(pair[0]), flight.request_id

        def take_half() -> None:
            if prefill.is_accepting:
                prefill.prefills.take_half(half, lambda output: self._first(request_id, output))
            else:
                self._network.hop(half.decode_worker_id, _claimant_gone(half.handoff_id))

        self._loop.after(hop_s, take_half)

    def _prefetch(self, index: int) -> None:
        """The client says that this turn comes soon. No one waits for an answer."""
        self.catch_up()
        arrival, spec = self._arrivals[index], self._network.spec
        prompt = arrival.prompt(index, spec.vocab_size)
        hashes = arrival.hashes(index, spec.vocab_size, spec.engine.block_size)
        request = RoutingRequest(f"{index}-0", prompt, exclude=self._gone, sequence_hashes=hashes)
        if self._gone.issuperset(self._router.worker_ids):
            return
        worker, order = self._worker(self._router.pick(self._router.survey(request)).worker_id), spec.order.unpaired
        message = Generate(
            request.request_id, prompt, [], 0, arrival.priority, order, sequence_hashes=hashes, is_prefetch=True
        )
        self._loop.after(self._network.costs.hop_s, lambda: worker.generate(message))

    def _worker(self, worker_id: str) -> SimulatedWorker:
        node = self._network.nodes[worker_id]
        assert isinstance(node, SimulatedWorker)
        return node

    def _first(self, request_id: str, output: TokenOutput | None) -> None:
        """The first token of a prefill worker (prefill-first), before the KV has arrived. None: it gives up."""

        def arrive() -> None:
            self.catch_up()
            flight = self._flights.get(request_id)
            if flight is not None:
                self._prefilled(flight)
                if output is not None:
                    self._take(flight, output)

        self._loop.after(self._network.costs.hop_s, arrive)

    def _prefilled(self, flight: _Flight) -> None:
        if flight.pair is not None and self.pairs is not None:
            self.pairs.prefilled(flight.request_id)
            flight.pair = None

    def _deliver(self, worker_id: str, delivery: Delivery) -> None:
        """What a worker's step has put out has arrived."""
        self.catch_up()
        self._tell_routers(worker_id, delivery.events, delivery.load)
        token_s, flights = self._token_s, self._flights
        free_at_s = self._busy_until(0.0) if delivery.outputs else 0.0
        for output in delivery.outputs:
            flight = flights.get(output.request_id)
            if flight is None:
                continue
            tokens_s = flight.result.tokens_s
            if tokens_s and output.finish_reason is None and output.position == len(tokens_s):
                # Most tokens are neither the first nor the last of an answer: half of the loop's time goes here.
                free_at_s += token_s
                tokens_s.append(free_at_s)
                continue
            self._free_at_s = free_at_s
            self._take(flight, output)
            free_at_s = self._free_at_s
        self._free_at_s = max(self._free_at_s, free_at_s)

    def catch_up(self) -> None:
        """Take what the workers' jumped steps have delivered until now, in order."""
        self._network.catch_up()
        quiet, position = self._quiet, self._loop.position
        if not quiet:
            return
        quiet.sort()
        num_due = 0
        for delivery in quiet:
            # At the very position it is of the worker that delivers now, which has sent the quiet one before.
            if Position(delivery.time_s, Rank.DELIVERY, delivery.number) > position:
                break
            num_due += 1
        if num_due:
            due, now_s = quiet[:num_due], self._loop.clock.now()
            del quiet[:num_due]
            for delivery in due:
                self._take_quiet(delivery)
            self._loop.clock.move_to(now_s)

    def _take_quiet(self, delivery: QuietDelivery) -> None:
        """A token for each row, none of which is an answer's last one; and cache events and load, if there are some."""
        self._loop.clock.move_to(delivery.time_s)
        if delivery.events is not None or delivery.load is not None:
            self._tell_routers(delivery.run.worker_id, delivery.events, delivery.load)
        flights, token_s, step = self._flights, self._token_s, delivery.step
        free_at_s = self._busy_until(0.0)
        for request_id, first in delivery.run.rows:
            flight = flights.get(request_id)
            if flight is None:
                continue
            tokens_s = flight.result.tokens_s
            if tokens_s and first + step == len(tokens_s):
                free_at_s += token_s
                tokens_s.append(free_at_s)
                continue
            self._free_at_s = free_at_s
            self._take(flight, TokenOutput(request_id, (TOKEN,), position=first + step))
            free_at_s = self._free_at_s
        self._free_at_s = free_at_s

    def _tell_routers(self, worker_id: str, events: KvEventBatch | None, load: LoadMetrics | None) -> None:
        for router in self._routers:
            if events is not None:
                router.apply_events(events)
            if load is not None and worker_id in self._network.listed:
                router.apply_metrics(load)

    def _take(self, flight: _Flight, output: TokenOutput) -> None:
        """Note new tokens; a pair's first token comes from both workers, and counts once."""
        tokens_s = flight.result.tokens_s
        num_new = output.position + len(output.token_ids) - len(tokens_s)
        if num_new > 0:
            if not tokens_s:
                (self._router if self.pairs is None else self.pairs).first_token(flight.request_id)
                flight.result.num_cached_tokens = output.num_cached_tokens or 0
                self.traffic.prefilled(len(flight.prompt), flight.result.num_cached_tokens)
            at_s = self._busy_until(self._token_s * num_new)
            tokens_s.extend([at_s] * num_new)
        if output.finish_reason is FinishReason.ERROR:
            self._move(flight, flight.worker_id)
        elif output.finish_reason is not None:
            flight.result.is_done = True
            self._end(flight)

    def _refused(self, worker_id: str, request_id: str, error: KvrelayError) -> None:
        self.catch_up()
        flight = self._flights.get(request_id)
        if flight is None:
            return
        self._leave(flight)
        if is_final(error):
            self._end(flight, str(error))
        else:
            flight.excluded.add(worker_id)
            self._loop.after(0.0, lambda: self._route(flight))

    def _move(self, flight: _Flight, worker_id: str) -> None:
        """Continue on another worker, which gets the tokens so far."""
        self._leave(flight)
        if flight.result.num_migrations >= self._network.spec.migration_limit:
            self._end(flight, f"worker {worker_id} is lost, and the request has moved too often")
            return
        flight.result.num_migrations += 1
        flight.excluded.add(worker_id)
        self._loop.after(0.0, lambda: self._route(flight))

    def _leave(self, flight: _Flight) -> None:
        """The request is no longer on its worker."""
        self._flights.pop(flight.request_id, None)
        flight.pair = None
        if self.pairs is not None:
            self.pairs.prefilled(flight.request_id)
        self._router.finished(flight.request_id, len(flight.result.tokens_s))

    def _end(self, flight: _Flight, error: str = "") -> None:
        self._leave(flight)
        flight.result.error = error
        if not error:
            self.traffic.ended(len(flight.result.tokens_s))
        self._num_open -= 1
        ended_s = self._free_at_s if flight.result.is_done else self._loop.clock.now()
        if flight.arrival.tool and flight.result.is_done:
            worker, request_id, tool = self._worker(flight.worker_id), flight.request_id, flight.arrival.tool
            self._loop.after(self._network.costs.hop_s, lambda: worker.session_paused(request_id, tool))
        for index in self._next.pop(flight.result.index, ()):
            arrival = self._arrivals[index]
            self._loop.at(ended_s + arrival.time_s, lambda index=index: self._send(index))  # type: ignore[misc]
            if arrival.prefetch_s:
                ahead_s = max(arrival.time_s - arrival.prefetch_s, 0.0)
                self._loop.at(ended_s + ahead_s, lambda index=index: self._prefetch(index))  # type: ignore[misc]
        if not self._num_open:
            self._on_over()


def _claimant_gone(handoff_id: HandoffId) -> Callable[[Node], None]:
    """What a decode worker is told of a pair whose prefill worker will not claim."""
    return lambda node: node.on_decode(de.ClaimantGone(handoff_id))
