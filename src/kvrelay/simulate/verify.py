"""How wrong the simulator is, by a recording of a real worker: the scheduler's error and the model's, apart.

recorded times  ──play back──> the same batches?                                  the scheduler's part: must be
fitted costs    ──simulate───> TTFT, ITL and E2E at the engine, against recorded   the model's part
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.config import DisaggConfig
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.errors import InvalidInputError
from kvrelay.placement.cost_model import StepCostModel
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.playback import Playback, play_back
from kvrelay.simulate.result import RequestResult, SimulationResult
from kvrelay.simulate.simulation import simulate


def verify(path: Path, costs: Costs | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Both errors of a recording, for JSON. ``costs`` None: fitted from the recording itself.

    ``scheduler``: steps played back, and the first difference ("" if none). ``model``: by latency, the recorded and the
    simulated seconds and the relative error, at mean and percentiles; None after a difference, or for a recording with
    hand-offs (its peers are not in it), with the reason in ``model_reason``. Raises InvalidInputError.
    """
    playback = play_back(path)
    found: dict[str, Any] = {
        "recording": str(path),
        "scheduler": {"num_steps": playback.num_steps, "difference": playback.difference},
        "model": None,
        "model_reason": "",
    }
    if playback.difference:
        found["model_reason"] = "the schedule differs, so the recorded latencies are incomplete"
    elif playback.has_handoffs:
        found["model_reason"] = "the recording has hand-offs, whose other workers are not in it"
    elif not any(request.is_done for request in playback.requests.values()):
        found["model_reason"] = "no answer was completed"
    else:
        found["model"] = _compare(playback, costs or fit(playback), seed)
    return found


def fit(playback: Playback) -> Costs:
    """The costs of the recorded engine alone: steps with their spread, and the time between them. Raises
    InvalidInputError without a computed step."""
    if not playback.works:
        raise InvalidInputError("the recording has no computed step to fit costs from")
    model = StepCostModel()
    for work, seconds in playback.works:
        model.add(work, seconds)
    return Costs(
        step=model.cost,
        spread=_spread(model.cost, playback.works),
        between_steps_s=statistics.median(playback.gaps_s) if playback.gaps_s else 0.0,
        model=playback.header.model,
    )


def _spread(cost: StepCost, works: Sequence[tuple[StepWork, float]]) -> float:
    """Standard deviation of the logarithm of measured over estimated, without the outermost hundredths."""
    ratios = sorted(
        math.log(seconds / estimate)
        for work, seconds in works
        if seconds > 0.0 and (estimate := cost.step_seconds(work)) > 0.0
    )
    cut = len(ratios) // 100
    kept = ratios[cut : len(ratios) - cut]
    return min(statistics.pstdev(kept), 2.0) if len(kept) > 1 else 0.0


def _compare(playback: Playback, costs: Costs, seed: int) -> dict[str, Any]:
    """One worker that gets the recorded requests when the engine got them, with nothing between it and the client."""
    header = playback.header
    arrivals = playback.load()
    spec = ClusterSpec(
        both=1,
        engine=replace(header.config, num_blocks=header.num_blocks),
        disagg=DisaggConfig(disagg_policy="threshold"),
        vocab_size=header.vocab_size,
        max_model_len=header.max_model_len,
        kv_buffer_size=0,
    )
    alone = msgspec.structs.replace(costs, hop_s=0.0, frontend_request_s=0.0, frontend_token_s=0.0)
    simulated = simulate(spec, arrivals, alone, seed=seed)
    recorded = _result(list(playback.requests.values()))
    ours, theirs = simulated.latencies(), recorded.latencies()
    table = {
        latency: {
            figure: {
                "recorded_s": theirs[latency][figure],
                "simulated_s": ours[latency][figure],
                "error": _relative(ours[latency][figure], theirs[latency][figure]),
            }
            for figure in theirs[latency]
        }
        for latency in theirs
        if ours
    }
    return {"costs": msgspec.to_builtins(costs), "num_requests": len(arrivals), "latencies": table}


def _result(requests: list[RequestResult]) -> SimulationResult:
    ends = [request.tokens_s[-1] for request in requests if request.tokens_s]
    return SimulationResult(requests, [], {}, max(ends, default=0.0))


def _relative(ours: float, theirs: float) -> float:
    return ours / theirs - 1.0 if theirs else 0.0 if ours == 0.0 else math.inf


def text_of(found: dict[str, Any]) -> str:
    """The report for people."""
    scheduler = found["scheduler"]
    verdict = f"DIFFERENT: {scheduler['difference']}" if scheduler["difference"] else "identical"
    lines = [f"schedule, recorded times played back: {scheduler['num_steps']} steps, {verdict}"]
    if found["model"] is None:
        return "\n".join([*lines, f"model: not compared; {found['model_reason']}"])
    lines.append(f"model, fitted costs, {found['model']['num_requests']} requests (simulated against recorded):")
    for latency, figures in found["model"]["latencies"].items():
        for figure, values in figures.items():
            recorded_ms, simulated_ms = values["recorded_s"] * 1e3, values["simulated_s"] * 1e3
            lines.append(
                f"  {latency[:-2].upper():4} {figure:4} {recorded_ms:10.2f} ms {simulated_ms:10.2f} ms "
                f"{values['error']:+8.1%}"
            )
    return "\n".join(lines)
