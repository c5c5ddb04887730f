"""The rows about failures: something is killed or stopped while KV is under way. Does every request end in time, none
with a wrong answer, and is every block free afterwards?"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvrelay.bench.errors import BenchError
from kvrelay.certify.answers import compare
from kvrelay.certify.ends import Await, Blocks, Check, Fill, HandOver
from kvrelay.certify.findings import Facts, Group, Row, Verdict
from kvrelay.certify.kv import TAKER_AT_REST, Pair, lay_to_rest
from kvrelay.certify.peer import PeerEnd
from kvrelay.certify.served import NUM_TOKENS, Reference
from kvrelay.certify.servers import RANK_MODULE, Answer, Cluster, Server, child_pid, tell_process
from kvrelay.errors import KvrelayError, TransferError
from kvrelay.transfer.values import TransferOp

DEADLINE_S = 120.0
"""Within which every request must have ended."""
STOPPED_S = 4.0
AT_ONCE = 6
UNDER_WAY_S = 3.0
NUM_LOST = 8
"""Transfers in a row, so that one is under way when its process is killed."""


class Harm(StrEnum):
    """What is done, to whom. The text is the row's."""

    KILL_PREFILL = "the prefill worker killed"
    STOP_PREFILL = "the prefill worker stopped for a while"
    KILL_DECODE = "the decode worker killed"
    KILL_RANK = "a rank killed"
    KILL_CONTROL = "the control plane killed"


async def prove_harm(
    harm: Harm, server: Server, cluster: Cluster, reference: Reference, cell: str, num_workers: int
) -> Row:
    """One harm in the middle of hand-offs. Only the decode worker's death may break answers off."""
    began_s = time.monotonic()
    title = f"{harm} in mid-transfer"
    long = sorted(range(len(reference.prompts)), key=lambda at: -len(reference.prompts[at]))[:AT_ONCE]
    outcomes: dict[int, Answer | str] = {}

    async def one(at: int) -> None:
        try:
            outcomes[at] = await server.answer(reference.prompts[at], NUM_TOKENS)
        except BenchError as exc:
            outcomes[at] = exc.message

    try:
        await cluster.until_idle(num_workers)
        await cluster.forget()
        victim = await _victim(harm, cluster)
        if victim is None:
            return Row(Group.HOLDS, title, cell, Verdict.SKIP, "this cluster has none of its own")
        tasks = [asyncio.create_task(one(at)) for at in long]
        try:
            is_under_way = await _until_under_way(cluster)
            await _do(harm, victim)
            _, late = await asyncio.wait(tasks, timeout=DEADLINE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answered_s = time.monotonic() - began_s
        healed_s = await cluster.until_idle(num_workers)
    except KvrelayError as exc:
        return Row(Group.HOLDS, title, cell, Verdict.FAIL, exc.message, seconds=time.monotonic() - began_s)
    row = judge_harm(harm, title, cell, reference, outcomes, len(late), answered_s, healed_s)
    evidence = {"a hand-off was open then": "yes" if is_under_way else "none was seen", **row.evidence}
    return msgspec.structs.replace(row, evidence=evidence)


def judge_harm(
    harm: Harm,
    title: str,
    cell: str,
    reference: Reference,
    outcomes: dict[int, Answer | str],
    num_late: int,
    answered_s: float,
    healed_s: float,
) -> Row:
    """From what became of the requests."""
    broken = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
    whole = [(at, outcome) for at, outcome in outcomes.items() if isinstance(outcome, Answer)]
    wrong = compare([reference.alone[at] for at, _ in whole], [each for _, each in whole], reference.tie)
    evidence: Facts = {
        "requests": len(outcomes) + num_late,
        "whole": len(whole),
        "broken off": len(broken),
        "s until all had ended": round(answered_s, 2),
        "s until whole, blocks free": round(healed_s, 2),
    }
    reason = f"{len(whole)} answers whole and right, {len(broken)} broken off with an error; all blocks free"
    verdict = Verdict.PASS
    if wrong.differing and len(wrong.differing) > len(reference.noise.differing):
        verdict, reason = Verdict.FAIL, f"{len(wrong.differing)} answers are wrong: {wrong.example}"
    elif num_late:
        verdict, reason = Verdict.FAIL, f"{num_late} requests had not ended after {DEADLINE_S:g} s"
    elif broken and harm not in (Harm.KILL_DECODE, Harm.KILL_RANK):
        verdict, reason = Verdict.WARN, f"{len(broken)} requests were broken off: {broken[0]}"
    return Row(Group.HOLDS, title, cell, verdict, reason, evidence, seconds=answered_s + healed_s)


async def _victim(harm: Harm, cluster: Cluster) -> int | None:
    if harm is Harm.KILL_CONTROL:
        return cluster.control_pid()
    if harm is Harm.KILL_RANK:
        ranks = [child_pid(int(status["pid"]), RANK_MODULE) for status in await cluster.workers()]
        return next((pid for pid in ranks if pid is not None), None)
    role = "decode" if harm is Harm.KILL_DECODE else "prefill"
    return int((await cluster.worker(role))["pid"])


async def _until_under_way(cluster: Cluster) -> bool:
    """Until a hand-off is open; False if none was seen to be."""
    end_s = time.monotonic() + UNDER_WAY_S
    while time.monotonic() < end_s:
        for status in await cluster.workers():
            if status["handoffs_in"] or status["handoffs_out"] or status["transfer"]["num_open_handoffs"]:
                return True
        await asyncio.sleep(0.01)
    return False


async def _do(harm: Harm, pid: int) -> None:
    if harm is not Harm.STOP_PREFILL:
        tell_process(pid, signal.SIGKILL)
        return
    tell_process(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        tell_process(pid, signal.SIGCONT)


# -- without a cluster ------------------------------------------------------------------------------------------------


def prove_lost_end(ends: Sequence[PeerEnd], cell: str, *, is_taker: bool, timeout_s: float) -> Row:
    """A process killed in mid-transfer. The giver's death leaves every other block of the taker untouched; the taker's
    death ends the transfer within its deadline."""
    began_s = time.monotonic()
    title = f"the {'receiving' if is_taker else 'sending'} process killed in mid-transfer"
    giver, taker = ends
    pair = Pair(giver, taker)
    own, theirs = pair.blocks(pair.most // 2)
    try:
        if (damage := lay_to_rest(taker, TAKER_AT_REST)) is not None:
            return Row(Group.HOLDS, title, cell, Verdict.FAIL, str(damage))
        giver.tell(Fill(own, 1))
        for number in range(NUM_LOST):
            giver.tell(HandOver(number, TransferOp.WRITE, own, theirs, is_notified=False))
        tell_process((taker if is_taker else giver).pid, signal.SIGKILL)
        if is_taker:
            told = giver.tell(Await(NUM_LOST - 1, timeout_s + 5.0))
            if told.error is None:
                return Row(Group.HOLDS, title, cell, Verdict.SKIP, "all transfers had ended before the process did")
            problem = told.error if "had not ended" in told.error else None
            reason = (
                problem or f"the transfer ended with an error after {told.seconds:.2f} s, of {timeout_s:g} s at most"
            )
        else:
            others = tuple(range(len(theirs.ids), taker.num_blocks))
            spilled = taker.tell(Check(Blocks(others, is_at_rest=True), TAKER_AT_REST)).damage
            problem = None if spilled is None else str(spilled)
            reason = problem or "no block beyond those that were handed over has changed"
    except TransferError as exc:
        problem = reason = exc.message
    verdict = Verdict.PASS if problem is None else Verdict.FAIL
    return Row(Group.HOLDS, title, cell, verdict, reason, seconds=time.monotonic() - began_s)
