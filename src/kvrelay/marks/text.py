"""A waterfall as text: a bar for each span, for terminals. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrelay.marks.waterfall import Span, Waterfall

BAR_CHARS = 48
NAME_CHARS = 20
UNITS = {
    **{"run_queue": "ms without a core", "transfer": "bytes", "saved": "bytes"},
    **{"late_token": "s", "migrated": "tokens"},
}
"""Of a span's value, by its phase."""


def text_of(shown: Waterfall) -> str:
    """Lines that end with the time that no span accounts for."""
    return "\n".join(printable(line) for line in (*_head(shown), "", *_bars(shown), "", *_sums(shown)))


def _head(shown: Waterfall) -> Iterator[str]:
    first = "no first token" if shown.ttft_ms is None else f"first token after {shown.ttft_ms:.1f} ms"
    yield f"{shown.id}  {shown.model}  {shown.status}"
    yield (
        f"{shown.latency_ms:.1f} ms, {first}; {shown.prompt_tokens} prompt tokens, {shown.output_tokens} answered; "
        f"prefill {shown.place or 'not placed'}; frontend {shown.frontend}"
    )
    if shown.error is not None:
        yield f"error: {shown.error}"
    for process in shown.processes:
        if not process.has_marks:
            yield f"{process.role} {process.name}: no marks"
        elif process.clock_uncertainty_ms is None:
            yield f"{process.role} {process.name}: its clock could not be compared"
        elif process.clock_uncertainty_ms:
            yield f"{process.role} {process.name}: clock known to +- {process.clock_uncertainty_ms:.2f} ms"


def _bars(shown: Waterfall) -> Iterator[str]:
    first_ms, last_ms = _range(shown.spans, shown.latency_ms)
    per_ms = BAR_CHARS / max(last_ms - first_ms, 1e-6)
    axis = f"{first_ms:.1f} to {last_ms:.1f} ms"
    yield f"{'PROCESS':{NAME_CHARS}} {'PHASE':11} {'FROM ms':>10} {'TOOK ms':>10} {axis:{BAR_CHARS}}  AMOUNT, NOTE"
    for span in shown.spans:
        low, high = sorted((span.start_ms - first_ms, span.end_ms - first_ms))
        start = min(int(low * per_ms), BAR_CHARS - 1)
        size = max(round((high - low) * per_ms), 1)
        mark = "|" if low == high else "!" if span.end_ms < span.start_ms else "░" if span.phase == "run_queue" else "█"
        bar = (" " * start + mark * size)[:BAR_CHARS]
        took = "" if low == high else f"{span.end_ms - span.start_ms:.2f}"
        more = "" if span.value is None else f"  {_amount(span.value)} {UNITS.get(span.phase, '')}".rstrip()
        note = "" if span.note is None else f"  {span.note}"
        name = f"{span.process[:NAME_CHARS]:{NAME_CHARS}} {span.phase:11}"
        yield f"{name} {span.start_ms:10.2f} {took:>10} {bar:{BAR_CHARS}}{more}{note}".rstrip()


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}"


def _sums(shown: Waterfall) -> Iterator[str]:
    if shown.estimates is not None:
        local_ms, remote_ms = shown.estimates.local_s * 1e3, shown.estimates.remote_s * 1e3
        yield f"estimated before: {local_ms:.1f} ms local, {remote_ms:.1f} ms remote"
    if shown.transfer is not None:
        yield f"transferred: {shown.transfer.bytes:,} bytes in {shown.transfer.descriptors:,} descriptors"
    if shown.drafts is not None:
        yield f"speculation: {shown.drafts.drafted:,} tokens drafted, {shown.drafts.accepted:,} accepted"
    share = shown.unattributed_ms / shown.latency_ms if shown.latency_ms else 0.0
    yield f"unattributed: {shown.unattributed_ms:.2f} ms ({share:.1%})"


def _range(spans: Sequence[Span], latency_ms: float) -> tuple[float, float]:
    times = [0.0, latency_ms, *(at for span in spans for at in (span.start_ms, span.end_ms))]
    return min(times), max(times)


def printable(line: str) -> str:
    """Names and errors may hold what a client has sent: a terminal must not obey it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
