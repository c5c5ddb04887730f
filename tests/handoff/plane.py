"""The ports of a world's two sides: what a side asks of an engine, a transport or a peer becomes part of the state, and
a move of its own carries it out later. Engines, too, are only what a side sees of them.

A call that is kept is the name of a method and its values: the side that it is run on is a copy of the one that asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
from tests.handoff.keys import CONN_STEP, without_words
from tests.handoff.nodes import PROMPT_TOKEN, D, Violation, number_of

from kvrelay.core.handoff import HandoffId
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.engine.request import Request
from kvrelay.engine.step import KeptBlocks, StepOutput
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffGrant, HandoffReleased
from kvrelay.rpc.wire import decode_message
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.sides.decode import DecodePorts
from kvrelay.worker.sides.prefill import Job, PrefillPorts

KEPT = 1000
"""What a block of the holding area is numbered above the block of the pool whose KV it has."""
Call = tuple[str, tuple[Any, ...]]
ANSWERED = frozenset({"_allocate", "_lend_prefix", "_keep", "_fetch"})
"""Calls of engines that are answered at once. After the others nothing is to be seen before the next move."""
LATE = ANSWERED | {"_compute_here"}
"""What an engine takes in later in any case; everything else if a scenario ``lags``."""


class Op(NamedTuple):
    """A transfer that was submitted. ``peer``: whose blocks ``remote`` are. ``done``: what is said behind it."""

    kind: str
    handoff_id: HandoffId
    peer: int
    generation: int
    local: tuple[int, ...]
    remote: tuple[int, ...]
    done: Any
    ended: Call
    group: str | None
    is_damaged: bool = False


class Blocks(NamedTuple):
    """Pieces of a transfer."""

    local: tuple[int, ...]
    remote: tuple[int, ...]
    num_bytes: int = 1
    num_pieces: int = 1


class JobRef(NamedTuple):
    """A job within a call."""

    handoff_id: HandoffId
    may_return: bool


def kept(call: Callable[..., object], *answers: Any) -> Call:
    """The call as values. Durations decide nothing."""
    arguments = answers
    if isinstance(call, partial):
        call, arguments = call.func, call.args + answers
    return (call.__name__, tuple([_frozen(argument) for argument in arguments]))


def _frozen(argument: Any) -> Any:
    if isinstance(argument, PlaneJob):
        return JobRef(argument.request.handoff_id, argument.may_return)
    if isinstance(argument, pe.Write) and argument.done is not None:
        return msgspec.structs.replace(argument, done=without_words(argument.done))
    return argument


class Stage:
    """The world in which something happens now. All worlds of an exploration have the same planes."""

    world: Any


class Plane:
    """What both sides have: turns, an engine's inbox, transfers, checksums."""

    lock = nullcontext()
    kind_of_read: str

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.number = stage, number

    @property
    def world(self) -> Any:
        return self.stage.world

    @property
    def node(self) -> Any:
        return self.stage.world.node(self.number)

    def run(self, call: Call, *answers: Any) -> None:
        """Run a kept call."""
        name, arguments = call
        thawed = [self.job(*value) if isinstance(value, JobRef) else value for value in arguments]
        getattr(self.node.side, name)(*thawed, *answers)

    def job(self, handoff_id: HandoffId, may_return: bool) -> PlaneJob:
        return PlaneJob(self, handoff_id, may_return)

    # -- turns --------------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return int(self.world.now)

    def plan_tick(self, due_s: Callable[[], float | None]) -> None:
        """A tick that is due is a move."""

    def on_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        self.node.todo += (("soon", kept(function, *arguments), ()),)

    def term(self) -> int:
        return int(self.node.lease.term)

    def may_use(self, num: int) -> None:
        self.node.num_in_memory = num

    # -- asked of others ----------------------------------------------------------------------------------------------

    def post(self, callback: Callable[[Any], None]) -> None:
        call = kept(callback)
        if self.world.scenario.lags or call[0] in LATE or self.node.inbox:
            self.node.inbox += (call,)
        else:
            self.run(call, self)

    def compute(self, block_ids: Sequence[int], on_done: Callable[..., None]) -> None:
        self.node.todo += (("checksum", kept(on_done), tuple(block_ids)),)

    def verify(self, block_ids: Sequence[int], sent: Any, on_done: Callable[..., None], num_units: int = 0) -> None:
        self.node.todo += (("verify", kept(on_done), tuple(block_ids)),)

    def pieces(self, op: TransferOp, worker_id: str, here: Any, there: Any, block_size: int) -> Blocks:
        return Blocks(here.block_ids, there.block_ids)

    def submit(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Any,
        notify: bytes | None = None,
        *,
        on_done: Callable[..., None],
        key: RemoteKey,
        group: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        done = None if notify is None else without_words(decode_message(notify))
        ended = kept(on_done)
        kind = "write" if op is TransferOp.WRITE else self.kind_of_read
        handoff_id, peer = ended[1][0].handoff_id, number_of(worker_id)
        new = Op(kind, handoff_id, peer, key.generation, *pieces[:2], done, ended, group)
        if group in self.node.failed_groups:
            self.node.ended_ops += ((new, False),)
            return
        ops = self.node.ops
        self.node.ops = (*ops, new) if self.world.scenario.transport_order else (new, *ops)

    # -- an engine ----------------------------------------------------------------------------------------------------

    @property
    def schedules(self) -> Any:
        return self


class DecodePlane(Plane):
    """Of the decode worker: its engine lends."""

    kind_of_read = "fetch"

    def ports(self) -> DecodePorts:
        me: Any = self
        return DecodePorts(me, me, me, me, me, me, self.push, self.count, self.count, self.may_use, self.term)

    def count(self, *_: Any) -> None:
        """Nothing is."""

    def push(self, prefill: Any) -> None:
        self.world.queue[prefill.handoff_id] = None

    def reach(self, worker_id: str, then: Callable[..., None]) -> None:
        if self.world.scenario.lags:
            self.node.todo += (("reach", kept(then), ()),)
        else:
            self.run(kept(then), None)

    def send(self, conn: int, message: Any) -> bool:
        p = self.world.ps[conn % CONN_STEP]
        if isinstance(message, HandoffGrant):
            self._expect_open(message)
        self.world.send(D, conn % CONN_STEP, conn, message)
        return bool(p.conn == conn)

    def _expect_open(self, message: HandoffGrant) -> None:
        ref = (str(message.handoff_id), message.generation)
        if any(self.node.writer.get(block, ref)[:2] != ref for block in message.block_ids):
            raise Violation("a grant is sent of blocks that another may write")
        is_lent = any(owner == message.handoff_id for owner, _ in self.node.loans)
        if is_lent and not any(handoff == ref[0] for handoff, _ in self.node.opened):
            raise Violation("a grant is sent before it is open")

    # -- the table of windows -----------------------------------------------------------------------------------------

    def open_window(self, window: MemoryWindow) -> None:
        d, key, loan = self.node, window.key, window.loan
        d.opened = frozenset(other for other in d.opened if other[0] != key.handoff) | {(key.handoff, loan)}
        for block in window.writable:
            d.writer[block] = (key.handoff, key.generation, loan)

    def close_window(self, handoff: str, loan: int) -> None:
        d = self.node
        d.opened -= {(handoff, loan)}
        d.writer = {block: who for block, who in d.writer.items() if (who[0], who[2]) != (handoff, loan)}

    # -- the engine ---------------------------------------------------------------------------------------------------

    @property
    def lends(self) -> DecodePlane | None:
        return None if self.world.scenario.by_engine else self

    @property
    def moves(self) -> DecodePlane:
        return self

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        world, d = self.world, self.node
        if d.is_full or not world.scenario.can_replace_blocks or d.status[handoff_id] != "waiting":
            return None
        hits = d.blocks.get(handoff_id, ())[: world.scenario.num_hit_blocks]
        blocks: tuple[int, ...] = hits + d.fresh(world.scenario.num_chunks)
        d.loans[handoff_id, loan] = blocks
        return blocks

    def lend_prefix(self, handoff_id: HandoffId, token_ids: Any, cache_salt: Any) -> tuple[int, ...] | None:
        """The prefix, if the cache still has it."""
        d = self.node
        if d.has_evicted:
            return None
        if (handoff_id, 1) in d.loans:
            raise Violation(f"{handoff_id} is lent twice; the first loan is forgotten")
        blocks = d.loans[handoff_id, 1] = tuple(range(self.world.scenario.num_hit_blocks))
        return blocks

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        if self.node.loans.pop((handoff_id, loan), None) is None:
            raise Violation(f"loan {loan} of {handoff_id} ends twice")
        if (str(handoff_id), loan) in self.node.opened:
            raise Violation(f"loan {loan} of {handoff_id} goes back, and a peer may use it")

    def resume_handoff(self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: Any) -> bool:
        d, scenario = self.node, self.world.scenario
        if d.status[handoff_id] in ("running", "local"):
            raise Violation(f"a first token for a request that is {d.status[handoff_id]}")
        if d.status[handoff_id] != "waiting":
            return False
        d.status[handoff_id] = "running"
        blocks = d.blocks[handoff_id] = d.loans[handoff_id, loan]
        for index, block in enumerate(blocks):
            wanted = ("hit", handoff_id) if index < scenario.num_hit_blocks else ("kv", handoff_id, 100 + index)
            if d.content.get(block) != wanted:
                raise Violation(f"block {block} of a running request holds {d.content.get(block)}, not {wanted}")
        if token_id != PROMPT_TOKEN:
            raise Violation("a wrong token")
        return True

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        d, scenario = self.node, self.world.scenario
        if d.status[handoff_id] == "local" or (d.status[handoff_id] == "running" and not scenario.by_engine):
            raise Violation(f"to be computed here, but it is {d.status[handoff_id]}")
        if not scenario.can_replace_blocks and any(owner == handoff_id for owner, _ in d.loans):
            raise Violation("to be computed in blocks that are lent")
        if d.status[handoff_id] == "waiting":
            d.status[handoff_id] = "local"
            d.blocks.pop(handoff_id, None)

    def fetch_handoff(self, handoff_id: HandoffId, kv_transfer_params: bytes) -> bool:
        if self.node.status[handoff_id] != "waiting":
            return False
        source = int(kv_transfer_params)
        self.node.ops += (Op("engine", handoff_id, source, 0, (), (), None, ("on_step", ()), None),)
        return True

    def handoff_told(self, request_id: str) -> None:
        """What an engine has marked is not explored."""

    def discard_kv(self, kv_transfer_params: bytes) -> None:
        """P's engine hears of it by P's own side."""


class PrefillPlane(Plane):
    """Of a prefill worker: its engine computes."""

    kind_of_read = "load"

    def ports(self) -> PrefillPorts:
        me: Any = self
        return PrefillPorts(me, me, me, me, me, me, self.may_use, self.prepare, lambda _: None, self.term)

    def prepare(self, sampling: SamplingParams, then: Callable[..., None]) -> None:
        self.node.todo += (("prepare", kept(then), ()),)

    # -- the decode worker --------------------------------------------------------------------------------------------

    def remember(self, worker_id: str, address: str) -> None:
        """There is one."""

    def reach(self, worker_id: str, then: Callable[..., None]) -> None:
        is_astray = self.node.is_astray and not self.node.conn
        if self.world.scenario.lags or is_astray or not self.world.connect(self.number):
            self.node.todo += (("connect", kept(then), ()),)
        else:
            self.node.is_astray = False
            self.run(kept(then), Link(self.world, self.number), None)

    def tell(self, worker_id: str, message: Any) -> None:
        if self.world.connect(self.number):
            self.world.send(self.number, D, self.node.conn, message)

    def release(self, worker_id: str, message: HandoffReleased, heard: Callable[[], None]) -> None:
        """``heard``: with the answer."""
        self.tell(worker_id, message)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        p, handoff_id = self.node, self.world.by_name[request.request_id]
        if handoff_id in p.held:
            raise Violation(f"{handoff_id} is computed twice at once")
        p.engine[handoff_id] = self._steps(handoff_id)
        p.held |= {handoff_id}

    def _steps(self, handoff_id: HandoffId) -> tuple[str, ...]:
        """All that is to be done for it."""
        scenario = self.world.scenario
        num_chunks = scenario.num_hit_blocks - scenario.num_known_hits + scenario.num_chunks
        steps = tuple(str(chunk) for chunk in range(num_chunks))
        return ("load", *steps) if scenario.num_known_hits else steps

    def has_begun(self, name: str) -> bool:
        p, handoff_id = self.node, self.world.by_name[name]
        return p.engine.get(handoff_id) != self._steps(handoff_id)

    def kv_loaded(self, name: str, ok: bool, num_blocks: int = 0) -> None:
        engine, handoff_id = self.node.engine, self.world.by_name[name]
        if engine.get(handoff_id, ("",))[:1] == ("loading",):
            engine[handoff_id] = engine[handoff_id][1:]

    def abort(self, name: str) -> None:
        self.node.engine.pop(self.world.by_name[name], None)

    def keep_blocks(self, name: str, block_ids: tuple[int, ...]) -> None:
        p, handoff_id = self.node, self.world.by_name[name]
        if handoff_id not in p.held:
            raise Violation(f"p{self.number} keeps blocks that it has freed")
        if not p.is_full:
            p.kept |= {handoff_id}
        blocks = None if p.is_full else tuple(block + KEPT for block in block_ids)
        p.side.on_step(StepOutput(kept_blocks=[KeptBlocks(name, blocks)]))

    def sending_finished(self, name: str) -> None:
        p, handoff_id = self.node, self.world.by_name[name]
        if handoff_id not in p.held:
            raise Violation(f"p{self.number} frees blocks twice")
        p.held -= {handoff_id}
        p.kept -= {handoff_id}
        p.engine.pop(handoff_id, None)


class PlaneJob(Job):
    """A queue entry, or the prefill half of a pair. Admission and frontends are not explored, and a prefill worker
    pulls by what it holds."""

    def __init__(self, plane: Plane, handoff_id: HandoffId, may_return: bool) -> None:
        super().__init__(plane.world.requests[handoff_id])
        self.plane, self.handoff_id, self.may_return = plane, handoff_id, may_return
        self.order = plane.world.scenario.order

    def settled(self) -> None:
        queue = self.plane.world.queue
        if queue.get(self.handoff_id) == self.plane.number:
            del queue[self.handoff_id]

    def returned(self) -> None:
        world = self.plane.world
        world.returned |= {self.handoff_id}
        if world.queue.get(self.handoff_id) == self.plane.number:
            world.queue[self.handoff_id] = None


class Reader:
    """Who wants a prefix: a load of a prefill worker's engine."""

    def __init__(self, plane: Plane, handoff_id: HandoffId) -> None:
        self.plane, self.handoff_id = plane, handoff_id

    def begins(self, num_bytes: int) -> None:
        """Nothing is counted."""

    def ended(self, ok: bool, num_blocks: int, reason: EndReason | None) -> None:
        p = self.plane.node
        if p.engine.pop(self.handoff_id, ()) != ("loading",):
            raise Violation(f"the load of {self.handoff_id} ends twice")
        p.held -= {self.handoff_id}


class Link:
    """A connection that a prefill worker has to the decode worker."""

    def __init__(self, world: Any, number: int) -> None:
        self.world, self.number = world, number
        self.conn = world.ps[number].conn

    def send(self, message: Any) -> None:
        self.world.send(self.number, D, self.conn, message)
