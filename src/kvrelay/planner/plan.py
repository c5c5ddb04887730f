"""``plan``: what to change in the fleet now, if anything. Pure: no clock, no I/O, equal inputs give equal plans.

    demand ──heard──> load ──assess──> lateness of the fleet as it is, and of each fleet that one change would make
                                            │
                       gain over the horizon > cost of the change, for long enough ──> Widen, Narrow, Start or Stop
                                            └── else ──> Hold, with the reason

A change of role is two halves. *Widening* opens a second door at once and drains nothing, so it needs one window of
evidence. *Stopping* needs three, and *narrowing* to prefill, which drains half of a worker, minutes. One change is
under way at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.step_cost import CostSource, StepWork, median_cost
from kvrelay.planner.base import (
    Action,
    Demand,
    FleetView,
    Hold,
    Narrow,
    Numbers,
    Objectives,
    Pending,
    Plan,
    PlannerState,
    Start,
    Stop,
    Widen,
    WorkerView,
)
from kvrelay.planner.capacity import Assessment, Load, Shape, Worker, assess, shape_of, standing
from kvrelay.planner.demand import growth, heard, load_of, stands, waits

WARM_STEPS = 32
"""The costs of a worker that has taken fewer are those of its start."""
WINDOWS_UP, WINDOWS_DOWN, WINDOWS_APART = 1, 3, 60
"""``APART``: for a worker that does both and shall only prefill. To undo that costs more than it gains if answers come
back within minutes, since their length is known only when they have ended."""
DEAD_BAND = 0.02
"""Lateness per request that is no reason to change anything, as a share of the objective for the first token."""
MIN_SHARE = 0.5
"""Of the lateness, over the number of workers: a change of role that saves less is within the error of the model."""
HEADROOM = 1.25
"""A worker is stopped only if the others would carry so many times the demand."""
ATTAINABLE = 1.25
"""An objective that one request alone misses is replaced by so many times what it takes alone."""
MAX_REVERSALS = 5
FORGIVE_HORIZONS = 2.0
"""A reversal is forgotten after so many horizons without a change."""
DRAIN_MARGIN = 2.0
"""A drain must gain so many times what it costs: the fleet should not follow every fluctuation."""
WIDEN_S = 1.0
"""Until routers and queue use a second door. To be narrowed later costs a prefill more, so that a change that was begun
is rather ended than a second one begun."""
MAX_GONE = 64
PATIENCE_S = 30.0
"""A role change that has not ended by then, beyond the time of its drain, is given up."""


class _Option(msgspec.Struct, frozen=True):
    """A change that is possible. ``kind`` names it over time, whichever worker it takes. ``then``: the fleet that it is
    meant to lead to. ``direction``: a change in the opposite one later is a reversal."""

    kind: str
    action: Action
    then: Shape
    direction: str
    num_windows: int
    cost_s: float
    delay_s: float = 0.0


class _Worth(msgspec.Struct, frozen=True):
    """A change that gains more than it costs, now."""

    option: _Option
    numbers: Numbers


ESTIMATED = "by costs of steps that are estimates"
_OPPOSITE = {"": None, "to prefill": "to decode", "to decode": "to prefill", "more": "less", "less": "more"}


def plan(fleet: FleetView, demand: Demand, objectives: Objectives, state: PlannerState) -> tuple[Plan, PlannerState]:
    """One action, and the state for the next call. ``demand``: since the last call, while which the fleet was watched.

    Nothing raises: costs that cannot be are ignored, workers that do not answer carry nothing and are not touched.
    """
    state = _settle(fleet, _seen_active(fleet, demand, heard(_by_hand(fleet, state), demand, objectives)))
    if state.pending is not None:
        return (Hold(f"waiting for {state.pending.worker_id or 'a worker'} to be ready", Numbers()),), state
    if not fleet.workers:
        return _from_zero(fleet, demand, objectives, state)
    if (option := _to_zero(fleet, objectives, state)) is not None:
        return _confirm(fleet, objectives, state, [_Worth(option, Numbers())])
    if reason := _blind(fleet):
        return (Hold(reason, Numbers()),), _without_evidence(state)
    worker = _worker(fleet)
    load = load_of(fleet, state)
    state = waits(state, fleet.now_s, load, objectives.window_s)
    attainable, unmet = _attainable(load, worker, objectives)
    if unmet and unmet.partition(":")[0] != state.told:
        return (Hold(unmet, Numbers()),), msgspec.structs.replace(
            _without_evidence(state), told=unmet.partition(":")[0]
        )
    if not unmet:
        state = msgspec.structs.replace(state, told="")
    (action,), state = _choose(fleet, load, worker, attainable, objectives, state)
    if any(known.load.step_cost_source is CostSource.ESTIMATED for known in _costs(fleet)):
        action = msgspec.structs.replace(action, reason=f"{action.reason}; {ESTIMATED}")
    return (action,), state


# -- what is known ----------------------------------------------------------------------------------------------------


def _by_hand(fleet: FleetView, state: PlannerState) -> PlannerState:
    """Workers whose role is not the one seen before or ordered since are held until they are released."""
    roles = {worker.worker_id: worker.role for worker in fleet.workers}
    changed = {name for name, role in roles.items() if state.roles.get(name, role) is not role}
    pending = state.pending
    if pending is not None and pending.worker_id in changed:
        if roles[pending.worker_id] in (pending.was, pending.role):
            changed.discard(pending.worker_id)
        else:
            pending = None
    # A worker may be unlisted while it changes, so those that have gone are remembered, too.
    gone = [(name, role) for name, role in state.roles.items() if name not in roles][-MAX_GONE:]
    return msgspec.structs.replace(
        state, pending=pending, roles=dict(gone) | roles, held=tuple(sorted(changed | set(state.held)))
    )


def released(state: PlannerState, worker_ids: Collection[str]) -> PlannerState:
    """These workers are the planner's again."""
    return msgspec.structs.replace(state, held=tuple(name for name in state.held if name not in worker_ids))


def not_begun(fleet: FleetView, before: PlannerState, after: PlannerState) -> PlannerState:
    """``after``, if the planned action was not carried out: it was only a suggestion, or failed."""
    return msgspec.structs.replace(
        after,
        roles=after.roles | {worker.worker_id: worker.role for worker in fleet.workers},
        pending=before.pending and after.pending,
        evidence_s=after.evidence_s or before.evidence_s,
        backlog=after.backlog or before.backlog,
        direction=before.direction,
        changed_s=before.changed_s,
        num_reversals=before.num_reversals,
    )


def _seen_active(fleet: FleetView, demand: Demand, state: PlannerState) -> PlannerState:
    loads = [worker.load for worker in fleet.workers]
    is_busy = any(load.num_admitted or load.num_waiting or load.num_prefill_tokens for load in loads)
    if state.active_s is None or is_busy or demand.num_requests or fleet.num_unplaced:
        return msgspec.structs.replace(state, active_s=fleet.now_s)
    return state


def _settle(fleet: FleetView, state: PlannerState) -> PlannerState:
    """The change under way is over if the fleet shows it, if its worker has gone, or if it has taken too long."""
    pending = state.pending
    if pending is None:
        return state
    has_gone = False
    found = {worker.worker_id: worker for worker in fleet.workers}
    if not pending.worker_id:
        is_over = any(worker.is_ready and worker.worker_id not in pending.known for worker in fleet.workers)
    elif pending.role is None:
        is_over = pending.worker_id not in found
    else:
        worker = found.get(pending.worker_id)
        is_over = worker is not None and worker.is_ready and worker.role is pending.role
        has_gone = worker is None
    if is_over:
        return msgspec.structs.replace(state, pending=None)
    if not has_gone and fleet.now_s < pending.until_s:
        return state
    # It counts as reversed, so that the next attempt must be worth more. The worker may come back in either role.
    return msgspec.structs.replace(
        state,
        pending=None,
        num_reversals=min(state.num_reversals + 1, MAX_REVERSALS),
        changed_s=fleet.now_s,
        roles={name: role for name, role in state.roles.items() if name != pending.worker_id},
    )


def _without_evidence(state: PlannerState) -> PlannerState:
    """What was seen before says nothing of what comes."""
    return msgspec.structs.replace(state, evidence_s={}, backlog=())


def _blind(fleet: FleetView) -> str:
    """Why nothing can be decided; empty: it can be."""
    num_ready = sum(worker.is_ready for worker in fleet.workers)
    num_starting = sum(worker.is_starting for worker in fleet.workers)
    num_silent = len(fleet.workers) - num_ready - num_starting
    if not num_ready:
        return f"none of {len(fleet.workers)} workers is ready"
    if num_silent > num_ready:
        return f"{num_silent} of {len(fleet.workers)} workers do not answer: perhaps this planner is cut off"
    if not _costs(fleet):
        return "no worker has published costs of its steps yet"
    return ""


def _costs(fleet: FleetView) -> list[WorkerView]:
    """Those whose costs count."""
    return [
        worker
        for worker in fleet.workers
        if (cost := worker.load.step_cost) is not None and cost.is_sound and worker.tokens.num_steps >= WARM_STEPS
    ]


def _worker(fleet: FleetView) -> Worker:
    known = [(worker.role.value, worker.load.step_cost) for worker in _costs(fleet)]
    cost, _ = median_cost([(role, cost) for role, cost in known if cost is not None])
    ready = [worker for worker in fleet.workers if worker.is_ready]
    return Worker(
        cost=cost,
        kv_tokens=min(worker.load.num_blocks * worker.block_size for worker in ready),
        num_slots=min((count for worker in ready if (count := worker.load.num_slots)), default=256),
        chunk=fleet.chunk,
        spread=min(max(fleet.spread, 0.0), 1.0) if math.isfinite(fleet.spread) else 0.1,
    )


def _attainable(load: Load, worker: Worker, objectives: Objectives) -> tuple[Objectives, str]:
    """Objectives that some fleet can meet, and which of those given none can: more workers do not shorten one prefill,
    nor the step of one answer."""
    alone_s = worker.cost.prefill_seconds(round(load.uncached_tokens), chunk=worker.chunk)
    token_s = worker.cost.token_seconds(StepWork(num_decodes=1, num_context_tokens=round(load.prompt_tokens)))
    unmet = ""
    if alone_s > objectives.ttft_s:
        unmet = (
            f"TTFT objective: {load.uncached_tokens:.0f} tokens take {alone_s:.3g} s on an idle worker, the objective "
            f"is {objectives.ttft_s:g} s; more workers do not shorten one prefill"
        )
        objectives = msgspec.structs.replace(objectives, ttft_s=ATTAINABLE * alone_s)
    if token_s > objectives.itl_s:
        unmet = (
            f"ITL objective: a token of a lone answer takes {token_s:.3g} s, the objective is {objectives.itl_s:g} s; "
            "more workers do not shorten it"
        )
        objectives = msgspec.structs.replace(objectives, itl_s=ATTAINABLE * token_s)
    return objectives, unmet


# -- what is possible -------------------------------------------------------------------------------------------------


def _from_zero(
    fleet: FleetView, demand: Demand, objectives: Objectives, state: PlannerState
) -> tuple[Plan, PlannerState]:
    """No worker: the first one does both."""
    if fleet.max_workers and (objectives.min_workers or demand.num_requests or fleet.num_unplaced):
        start = Start(WorkerRole.BOTH, "no worker, and requests or --min-workers ask for one", Numbers())
        return (start,), _begun(fleet, state, _Option("start", start, Shape(both=1), "", 0, 0.0))
    reason = "no worker, and no request" if fleet.max_workers else "no worker, and no room to start one"
    return (Hold(reason, Numbers()),), state


def _to_zero(fleet: FleetView, objectives: Objectives, state: PlannerState) -> _Option | None:
    """After a quiet time all workers go, one after another; unless one has to stay, which then serves alone. Prefill
    workers go first: no request needs them."""
    if objectives.min_workers or not fleet.max_workers or state.active_s is None:
        return None
    may_go = [worker for worker in fleet.workers if worker.may_stop and _is_free(worker, state)]
    quiet_s = fleet.now_s - state.active_s
    if len(may_go) < len(fleet.workers) or quiet_s < objectives.quiet_s:
        return None
    first = min(may_go, key=lambda worker: (worker.role.takes_requests, worker.worker_id))
    stop = Stop(first.worker_id, "", Numbers())
    return _Option(f"no request for {quiet_s:.0f} s", stop, shape_of(fleet).plus(first.role, -1), "", 0, 0.0)


def _is_free(worker: WorkerView, state: PlannerState) -> bool:
    """Whether the planner may change it now."""
    return worker.is_ready and not worker.is_held and worker.worker_id not in state.held


def _least_busy(workers: Iterable[WorkerView], state: PlannerState, role: WorkerRole) -> WorkerView | None:
    """The worker of that role whose change hurts least; None: none may be changed."""
    free = [worker for worker in workers if worker.role is role and _is_free(worker, state)]

    def busy(worker: WorkerView) -> tuple[int, int, str]:
        load = worker.load
        return load.num_admitted + load.num_waiting, load.num_prefill_tokens, load.worker_id

    return min(free, key=busy, default=None)


def _options(fleet: FleetView, state: PlannerState, now: Assessment, shape: Shape, cost_s: float) -> list[_Option]:
    """Every change of one worker. ``cost_s``: of a drain with its lost prefixes."""
    prefill, decode, both = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
    found = []
    if (worker := _least_busy(fleet.workers, state, prefill)) is not None:
        widen = Widen(worker.worker_id, "", Numbers())
        found.append(
            _Option(
                "prefill -> both",
                widen,
                shape.plus(prefill, -1).plus(both),
                "to decode",
                WINDOWS_UP,
                WIDEN_S + now.ttft_s,
            )
        )
    if (worker := _least_busy(fleet.workers, state, both)) is not None:
        then = shape.plus(both, -1)
        narrow = Narrow(worker.worker_id, prefill, "", Numbers())
        found.append(_Option("both -> prefill", narrow, then.plus(prefill), "to prefill", WINDOWS_APART, cost_s))
        narrow = Narrow(worker.worker_id, decode, "", Numbers())
        found.append(_Option("both -> decode", narrow, then.plus(decode), "to decode", WINDOWS_UP, now.ttft_s))
    elif (worker := _least_busy(fleet.workers, state, decode)) is not None:
        widen = Widen(worker.worker_id, "", Numbers())
        then = shape.plus(decode, -1).plus(prefill)
        found.append(_Option("decode -> both", widen, then, "to prefill", 2 * WINDOWS_UP, cost_s))
    if len(fleet.workers) < fleet.max_workers:
        for role in (prefill, both if shape.both else decode):
            start = Start(role, "", Numbers())
            found.append(
                _Option(f"start {role}", start, shape.plus(role), "more", WINDOWS_UP, fleet.start_s, fleet.start_s)
            )
    return [option for option in found if option.then.is_allowed]


def _stops(fleet: FleetView, state: PlannerState, objectives: Objectives, shape: Shape) -> list[_Option]:
    if not fleet.max_workers or len(fleet.workers) <= max(objectives.min_workers, 1):
        return []
    found = []
    stoppable = [worker for worker in fleet.workers if worker.may_stop]
    for role in WorkerRole:
        if (worker := _least_busy(stoppable, state, role)) is not None:
            stop = Stop(worker.worker_id, "", Numbers())
            # One kind: which role can best be spared changes from call to call.
            found.append(_Option("stop", stop, shape.plus(role, -1), "less", WINDOWS_DOWN, 0.0))
    return [option for option in found if option.then.is_allowed]


# -- the decision -----------------------------------------------------------------------------------------------------


def _choose(
    fleet: FleetView, load: Load, worker: Worker, objectives: Objectives, given: Objectives, state: PlannerState
) -> tuple[Plan, PlannerState]:
    """``objectives``: those that some fleet can meet; ``given``: what people are told of."""
    shape = shape_of(fleet)
    load = msgspec.structs.replace(load, least_share=state.least_share)
    if any(shares := stands(state.backlog, objectives)):
        load = standing(shape, load, worker, objectives, *shares)
        state = msgspec.structs.replace(state, least_share=load.least_share)
    now = assess(shape, load, worker, objectives)
    hits = sum(worker.load.prefix_hit_rate for worker in fleet.workers) / len(fleet.workers)
    lost_prefix_s = hits * worker.kv_tokens * worker.cost.prefill_token_s
    options = _options(fleet, state, now, shape, DRAIN_MARGIN * (now.drain_s + lost_prefix_s))
    quiet = DEAD_BAND * objectives.ttft_s * load.requests_per_s
    growing = growth(state.samples) * fleet.start_s
    worth: list[_Worth] = []
    for option in options:
        grown = load
        if isinstance(option.action, Start):
            grown = msgspec.structs.replace(load, requests_per_s=load.requests_per_s + growing)
        before = now if grown is load else assess(shape, grown, worker, objectives)
        after = assess(option.then, grown, worker, objectives)
        saved = before.lateness - max(after.lateness, quiet)
        seconds = max(objectives.horizon_s, 3.0 * option.delay_s) - option.delay_s
        cost_s = option.cost_s * 2.0**state.num_reversals
        least = 0.0 if isinstance(option.action, Start) else MIN_SHARE * before.lateness / shape.total
        if saved > max(quiet, least) and saved * seconds > cost_s:
            worth.append(_Worth(option, _numbers(load, before, after, saved * seconds, cost_s)))
    if not worth:
        worth = _stop(fleet, load, worker, objectives, state, shape, now)
    state = _weighed(fleet, objectives, state, {each.option.kind for each in worth})
    if not worth:
        numbers = _numbers(load, now, now, 0.0, 0.0)
        reason = "the objectives are met" if now.lateness <= quiet else _no_help(fleet, numbers, given)
        return (Hold(reason, numbers),), _forgiving(fleet, objectives, state)
    return _confirm(fleet, given, state, worth)


def _stop(
    fleet: FleetView,
    load: Load,
    worker: Worker,
    objectives: Objectives,
    state: PlannerState,
    shape: Shape,
    now: Assessment,
) -> list[_Worth]:
    """The stop that makes requests least later, if that is hardly at all, now and with more demand. Lateness that no
    fleet can avoid keeps no worker."""
    rate = (load.requests_per_s + growth(state.samples) * fleet.start_s) * HEADROOM
    loads = (load, msgspec.structs.replace(load, requests_per_s=rate))

    def lost(option: _Option) -> float:
        after, before = ([assess(each, some, worker, objectives) for some in loads] for each in (option.then, shape))
        return max(then.lateness - was.lateness for then, was in zip(after, before))

    options = _stops(fleet, state, objectives, shape)
    if not options or lost(option := min(options, key=lost)) > DEAD_BAND * objectives.ttft_s * rate / 2:
        return []
    after = assess(option.then, load, worker, objectives)
    return [_Worth(option, _numbers(load, now, after, 0.0, 0.0))]


def _weighed(fleet: FleetView, objectives: Objectives, state: PlannerState, kinds: Collection[str]) -> PlannerState:
    """With the evidence of this look. Each kind of change has its own: two of which now one and now the other is the
    better one are both worth it all the time. A look that says otherwise takes back as much as one that agrees gives,
    so that noise does not begin the count anew."""
    since_s = min(max(fleet.now_s - state.looked_s, 0.0), objectives.window_s)
    before = {kind: seconds - since_s for kind, seconds in state.evidence_s.items() if kind not in kinds}
    now = {kind: state.evidence_s.get(kind, -since_s) + since_s for kind in sorted(kinds)}
    left = {kind: seconds for kind, seconds in before.items() if seconds >= 0.0}
    return msgspec.structs.replace(state, looked_s=fleet.now_s, evidence_s=left | now)


def _confirm(
    fleet: FleetView, objectives: Objectives, state: PlannerState, worth: Sequence[_Worth]
) -> tuple[Plan, PlannerState]:
    """The best change of those for which there is enough evidence; or nothing, if a better one has it within a window.
    The best one of all may need minutes of it: until then it only excludes changes in the opposite direction."""

    def needs_s(one: _Worth) -> float:
        return one.option.num_windows * objectives.window_s * 2.0**state.num_reversals

    def missing_s(one: _Worth) -> float:
        return needs_s(one) - state.evidence_s.get(one.option.kind, 0.0)

    def gain_s(one: _Worth) -> float:
        return one.numbers.gain_s - one.numbers.cost_s

    opposite = _OPPOSITE[max(worth, key=gain_s).option.direction]
    soon = [one for one in worth if missing_s(one) <= objectives.window_s and one.option.direction != opposite]
    best = max(soon or worth, key=gain_s)
    option, numbers = best.option, best.numbers
    if missing_s(best) > 0.0:
        seconds = state.evidence_s.get(option.kind, 0.0)
        reason = f"{option.kind} is worth its cost since {seconds:.0f} s; it needs {needs_s(best):.0f} s"
        return (Hold(reason, numbers),), _forgiving(fleet, objectives, state)
    reason = f"{option.kind}: {_told(option, numbers, objectives)}" if numbers != Numbers() else option.kind
    action = msgspec.structs.replace(option.action, reason=reason, numbers=numbers)
    return (action,), _begun(fleet, state, msgspec.structs.replace(option, action=action))


def _begun(fleet: FleetView, state: PlannerState, option: _Option) -> PlannerState:
    """The state after the action was given out."""
    action, roles = option.action, dict(state.roles)
    worker_id = "" if isinstance(action, Start | Hold) else action.worker_id
    role: WorkerRole | None = None
    limit_s = PATIENCE_S + 2.0 * fleet.start_s if isinstance(action, Start) else PATIENCE_S + 4.0 * option.cost_s
    if isinstance(action, Widen):
        role = WorkerRole.BOTH
    elif isinstance(action, Narrow):
        role = action.role
    if role is not None:
        roles[worker_id] = role
    is_reversal = state.direction == _OPPOSITE[option.direction]
    return msgspec.structs.replace(
        _without_evidence(state),
        roles=roles,
        pending=Pending(
            worker_id=worker_id,
            role=role,
            was=state.roles.get(worker_id),
            known=tuple(worker.worker_id for worker in fleet.workers),
            until_s=fleet.now_s + limit_s,
        ),
        direction=option.direction,
        changed_s=fleet.now_s,
        num_reversals=min(state.num_reversals + is_reversal, MAX_REVERSALS),
    )


def _forgiving(fleet: FleetView, objectives: Objectives, state: PlannerState) -> PlannerState:
    """A quiet time halves the patience that reversals have cost."""
    if state.num_reversals and fleet.now_s - state.changed_s > FORGIVE_HORIZONS * objectives.horizon_s:
        return msgspec.structs.replace(state, num_reversals=state.num_reversals - 1, changed_s=fleet.now_s)
    return state


def _no_help(fleet: FleetView, numbers: Numbers, objectives: Objectives) -> str:
    """Why the objectives are missed and nothing is changed."""
    slots = ""
    if fleet.max_workers <= len(fleet.workers):
        used = f"all {fleet.max_workers} slots are used"
        slots = f"{used if fleet.max_workers else 'no worker can be started here (--max-workers)'}, and "
    name, now_s, _, aim_s = _worse(numbers, objectives)
    return f"{slots}no single change is worth its cost: {_missed(name, now_s, aim_s)}"


def _told(option: _Option, numbers: Numbers, objectives: Objectives) -> str:
    """The change in words: what it is for, and what it is expected to do."""
    name, now_s, then_s, aim_s = _worse(numbers, objectives)
    how = ""
    match option.action:
        case Stop(worker_id):
            return f"without {worker_id}, {name} is expected to take {then_s:.3g} s, objective {aim_s:g} s"
        case Start(role):
            number = getattr(option.then, role.value)
            which = _ORDINALS[number - 1] if number <= len(_ORDINALS) else "further"
            how = f"a {which} {'aggregated' if role is WorkerRole.BOTH else role} worker"
        case Narrow(worker_id, role):
            how = f"{worker_id} with {role} only"
        case Widen(worker_id):
            how = f"{worker_id} with both halves of the work"
    return f"{_missed(name, now_s, aim_s)}; {how} is expected to make it {then_s:.3g} s"


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


def _worse(numbers: Numbers, objectives: Objectives) -> tuple[str, float, float, float]:
    """The objective that is missed by more: its name, its time now and after the change, and itself."""
    if numbers.ttft_s / objectives.ttft_s >= numbers.itl_s / objectives.itl_s:
        return "first token", numbers.ttft_s, numbers.ttft_then_s, objectives.ttft_s
    return "time between tokens", numbers.itl_s, numbers.itl_then_s, objectives.itl_s


def _missed(name: str, now_s: float, aim_s: float) -> str:
    beyond = "" if now_s > aim_s else "some beyond the "
    return f"{name} is expected to take {now_s:.3g} s, {beyond}objective {aim_s:g} s"


def _numbers(load: Load, before: Assessment, after: Assessment, gain_s: float, cost_s: float) -> Numbers:
    return Numbers(
        lateness=before.lateness,
        lateness_then=after.lateness,
        gain_s=gain_s,
        cost_s=cost_s,
        requests_per_s=load.requests_per_s,
        uncached_tokens=load.uncached_tokens,
        answer_tokens=load.answer_tokens,
        prefill_utilisation=before.prefill_utilisation,
        decode_utilisation=before.decode_utilisation,
        ttft_s=before.ttft_s,
        itl_s=before.itl_s,
        ttft_then_s=after.ttft_s,
        itl_then_s=after.itl_s,
    )
