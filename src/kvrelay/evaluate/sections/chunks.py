"""Chunk sizes: how many prompt tokens a step takes beside decodes, up to whole prompts."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate import forecast
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GAP_P99, TTFT_P90, Row, effects, good, median, points_of
from kvrelay.evaluate.findings import Line, Plot, Section
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.sections.sizes import outcomes_table, spread_text, stress_factors
from kvrelay.evaluate.shown import comparison
from kvrelay.evaluate.workbench import ONE, ServerCase, Workbench
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.trial import Candidate, Outcome

NAME = "chunks"
LENGTHS, SHORT_LENGTHS = (32, 128, 512, 2048), (64,)
SHARE = 0.35
"""Of the capacity of two workers, for one."""


def lengths_of(bench: Workbench) -> list[int]:
    """Chunk lengths that differ for this model; the last one takes whole prompts."""
    given = SHORT_LENGTHS if bench.options.is_short else LENGTHS
    return [*(length for length in given if length < bench.load.context), bench.load.context]


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    num = len(lengths_of(bench))
    return [Wish(NAME, num, (basis.at(SHARE),), forecast.seconds_for(bench, 2 * num))]


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    lengths = lengths_of(bench)
    # vLLM takes as many answers at once as the shortest chunk has tokens, or refuses it.
    flags = (*ONE.flags, "--max-num-seqs", str(lengths[0]), "--max-num-batched-tokens")
    cases = [ServerCase(case_name(length, lengths), (*flags, str(length))) for length in lengths]
    rows = bench.rows(NAME, cases, [basis.at(SHARE)])
    best, slots = advice.best, bench.options.slots
    sizes = ((0, 0, slots), (max(best.prefill, 1), best.decode or slots - 1, 0))
    candidates = [Candidate(*size, 1, length) for length in lengths for size in sizes]
    simulated = forecast.outcomes(bench, basis, "chunks, simulated", candidates, stress_factors(advice)[-1:])
    return [section_of(rows, simulated, lengths, advice.rate)]


def case_name(length: int, lengths: Sequence[int]) -> str:
    return "whole prompts" if length == lengths[-1] else f"chunks of {length}"


def section_of(
    rows: Sequence[Row], simulated: Sequence[tuple[Candidate, float, Outcome]], lengths: Sequence[int], rate: float
) -> Section:
    points = points_of(rows)
    large = case_name(lengths[-1], lengths)
    found = effects(rows, (TTFT_P90, GAP_P99), large, [case_name(length, lengths) for length in lengths[:-1]], points)
    figures = (("first tokens P90", "ttft_p90_s"), ("gaps P99", "gap_p99_s"))
    lines = tuple(
        Line(
            name,
            tuple(
                (float(length), 1e3 * value)
                for length in lengths
                if (value := median(good(rows, case_name(length, lengths), points[0]), figure)) is not None
            ),
        )
        for name, figure in figures
    )
    return comparison(
        "Chunk sizes",
        f"Measured on one worker that prefills in chunks beside decodes, of which it runs up to {lengths[0]}. Then "
        "simulated for all slots, at the highest rate that the best cluster holds.",
        rows,
        found,
        more=f" {kept_sentence(simulated)}",
        tables=[outcomes_table(simulated, rate)],
        plots=(Plot("First tokens and gaps over the chunk's length", "tokens", "ms", lines),),
    )


def kept_sentence(simulated: Sequence[tuple[Candidate, float, Outcome]]) -> str:
    """Which chunks keep most requests within the objectives, apart and together."""
    said = []
    for is_split, name in ((False, "aggregated"), (True, "split")):
        own = [(one.chunk, outcome.goodput) for one, _, outcome in simulated if one.is_split is is_split]
        low, high = min(share for _, share in own), max(share for _, share in own)
        best = next(chunk for chunk, share in own if share == high)
        said.append(
            f"{name}, all chunk lengths keep {spread_text(low, high)} of the requests within the objectives"
            if high - low < 0.02
            else f"{name}, chunks of {best} keep most requests within the objectives, {high:.0%} (others {low:.0%})"
        )
    return f"Simulated: {'; '.join(said)}."
