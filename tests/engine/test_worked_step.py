"""The step that docs/extending.md explains, run."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.events import BlockStored
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_the_worked_step(make_engine: Callable[..., EngineCore]) -> None:
    engine = make_engine(block_size=4, max_num_batched_tokens=16, num_blocks=32)
    seen: list[SchedulerOutput] = []
    execute = engine.executor.execute

    def recorded(work: SchedulerOutput) -> ModelOutput:
        seen.append(work)
        return execute(work)

    engine.executor.execute = recorded  # type: ignore[method-assign]
    a, b, c = (
        Request(name, list(range(first, first + count)), SAMPLING)
        for name, first, count in (("a", 10, 8), ("b", 100, 40), ("c", 200, 6))
    )
    engine.add_request(a)
    engine.step()
    engine.add_request(b)
    engine.step()
    before = [(len(request.token_ids), request.num_computed_tokens, len(request.block_ids)) for request in (a, b)]
    assert before == [(10, 9, 3), (40, 15, 10)]
    engine.add_request(c)
    output = engine.step()
    work = seen[-1]
    assert (work.num_tokens.tolist(), work.samples.tolist()) == ([1, 6, 9], [True, True, False])
    assert (len(a.token_ids), a.num_computed_tokens) == (11, 10)
    assert (len(c.token_ids), c.status) == (7, RequestStatus.RUNNING)
    assert b.num_computed_tokens == 24
    stored = [event for event in output.kv_events if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [1, 3]
    engine.check_integrity()
