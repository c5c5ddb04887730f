"""PUT, PUT_ASYNC and GET under serving load, over the transports of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GAP_P99, Figure, Row, effects, effects_sentence, effects_table, unmeasured
from kvrelay.evaluate.findings import Section
from kvrelay.evaluate.shown import failures, rows_table
from kvrelay.evaluate.workbench import SPLIT, ServerCase, Workbench
from kvrelay.simulate.advise import Advice

NAME = "transfers"
WAYS = (("p2p", "PUT"), ("p2p", "PUT_ASYNC"), ("p2p", "GET"), ("nixl", "PUT"), ("nixl", "GET"), ("shm", "PUT"))
NUM_SHORT = 3
SHARE = 0.5
TTFT_P50 = Figure("ttft_p50_s", "median first tokens", "ms", 1e3)


def cases_of(bench: Workbench) -> list[ServerCase]:
    ways = WAYS[:NUM_SHORT] if bench.options.is_short else WAYS
    return [
        ServerCase(
            f"{transport} {send_type}",
            (*SPLIT.flags, "--disagg-policy", "always", "--transport", transport, "--send-type", send_type),
        )
        for transport, send_type in ways
    ]


def seconds_for(bench: Workbench) -> float:
    return bench.seconds_for(len(cases_of(bench)), 1)


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    cases = cases_of(bench)
    rows = bench.rows(NAME, cases, [basis.at(SHARE)])
    return [section_of(rows, [case.name for case in cases])]


def section_of(rows: Sequence[Row], cases: Sequence[str]) -> Section:
    """All ways beside the first one."""
    points = list(dict.fromkeys(row["point"] for row in rows))
    found = effects(rows, (TTFT_P50, GAP_P99), cases[0], cases[1:], points)
    return Section(
        "PUT, PUT_ASYNC and GET under load",
        effects_sentence(found) + unmeasured(rows, cases),
        "1P1D with every prefill remote. PUT waits until the KV has landed, PUT_ASYNC does not; with GET the decode "
        "worker fetches it. Times in milliseconds.",
        (rows_table(rows), effects_table(found)),
        notes=failures(rows),
    )
