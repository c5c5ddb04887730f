"""The link: KV bytes of a token, and the bandwidth at which a hand-off ends with its prefill. Arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvrelay.certify.findings import CertifyReport
from kvrelay.config.files import read_file
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Section, Table
from kvrelay.simulate.costs import Costs

LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 32768)


def read_certificate(path: Path | None) -> CertifyReport | None:
    """What ``kvrelay certify`` has found. Raises InvalidInputError."""
    if path is None:
        return None
    try:
        return msgspec.json.decode(read_file(path), type=CertifyReport)
    except (OSError, *UNREADABLE) as exc:
        raise InvalidInputError(f"--certificate {path} is not the certify.json of kvrelay certify: {exc}") from exc


def take(basis: Basis, context: int, certificate: CertifyReport | None) -> Section:
    costs = basis.costs[1]
    notes = [] if certificate is None else certified(certificate, most_needed(costs, context))
    return section_of(costs, context, tuple(notes), basis.not_measured)


def certified(certificate: CertifyReport, needed: float) -> list[str]:
    """A sentence for each path that was measured; ``needed``: bytes per second."""
    paths = [row.series[0] for row in certificate.rows if row.series and row.series[0].chart == "bandwidth"]
    said = []
    for path in paths:
        best = max((speed for _, speed in path.points), default=0.0)
        does = "hides" if best >= needed else "does not hide"
        said.append(
            f"The certified path {path.name} ({certificate.machine}) has {best / 1e6:.3g} MB/s and {does} hand-offs."
        )
    return said or ["The certificate has no bandwidth: run kvrelay certify --only fast."]


def most_needed(costs: Costs, context: int) -> float:
    """Bytes per second at the length of prompts of which a prefill worker makes most."""
    return max(hiding_bytes_per_s(costs, length) for length in LENGTHS if length <= context)


def hiding_bytes_per_s(costs: Costs, num_tokens: int) -> float:
    """KV of the prompt over the time of its prefill: a link that is as fast carries each chunk while the next one is
    computed."""
    return costs.token_bytes * num_tokens / costs.step.prefill_seconds(num_tokens)


def section_of(costs: Costs, context: int, notes: tuple[str, ...] = (), not_measured: Sequence[str] = ()) -> Section:
    """``not_measured``: names of costs that are assumed."""
    link = "that was measured here"
    if "link_bytes_per_s" in not_measured:
        link = "was not measured, since larger transfers took no longer here: the one that is assumed"
    if "token_bytes" in not_measured:
        link = "was not measured, since no prompt was computed remotely: it is assumed, as are a token's bytes, and"
    bytes_per_token, rows = costs.token_bytes, []
    for length in (length for length in LENGTHS if length <= context):
        needed, prefill_s = hiding_bytes_per_s(costs, length), costs.step.prefill_seconds(length)
        here_s = costs.transfer_overhead_s + bytes_per_token * length / costs.link_bytes_per_s
        rows.append(
            (
                f"{length}",
                f"{bytes_per_token * length / 2**20:.2f}",
                f"{prefill_s * 1e3:.1f}",
                f"{needed / 1e6:.3g}",
                f"{needed * 8 / 1e9:.3g}",
                f"{here_s * 1e3:.2f}",
            )
        )
    most = most_needed(costs, context)
    share = costs.link_bytes_per_s / most
    verdict = "hides hand-offs" if share >= 1.0 else "does not hide hand-offs: first tokens wait for it"
    return Section(
        "The link between prefill and decode",
        f"A token's KV is {bytes_per_token:,} bytes. A prefill worker makes up to {most / 1e6:.3g} MB of it a second. "
        f"The link {link} has {costs.link_bytes_per_s / 1e6:.3g} MB/s, "
        f"{share:.2g} times as much, and {verdict}. With x prefill workers on one link it needs x times as much.",
        "Bytes, prefill times and link from the calibration. The needed "
        "bandwidth carries the KV in the time of the prefill.",
        (Table(("prompt tokens", "KV, MiB", "prefill, ms", "needed, MB/s", "Gb/s", "transfer here, ms"), tuple(rows)),),
        notes=notes,
    )
