"""The link: KV bytes of a token, and the bandwidth at which a hand-off ends with its prefill. Arithmetic."""

from __future__ import annotations

from pathlib import Path

from kvrelay.certify.machine import kv_layout
from kvrelay.errors import KvrelayError
from kvrelay.evaluate.findings import Section, Table
from kvrelay.simulate.costs import Costs

LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 32768)


def take(model_path: Path, costs: Costs, context: int) -> Section:
    try:
        bytes_per_token = kv_layout(model_path, 16).bytes_per_token
    except KvrelayError as exc:
        return section_of(costs.token_bytes, costs, context, (f"as measured, because {exc.message}",))
    return section_of(bytes_per_token, costs, context)


def hiding_bytes_per_s(bytes_per_token: int, costs: Costs, num_tokens: int) -> float:
    """KV of the prompt over the time of its prefill: a link that is as fast carries each chunk while the next one is
    computed."""
    return bytes_per_token * num_tokens / costs.step.prefill_seconds(num_tokens)


def section_of(bytes_per_token: int, costs: Costs, context: int, notes: tuple[str, ...] = ()) -> Section:
    rows = []
    for length in (length for length in LENGTHS if length <= context):
        needed, prefill_s = hiding_bytes_per_s(bytes_per_token, costs, length), costs.step.prefill_seconds(length)
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
    most = max(hiding_bytes_per_s(bytes_per_token, costs, length) for length in LENGTHS if length <= context)
    share = costs.link_bytes_per_s / most
    verdict = "hides hand-offs" if share >= 1.0 else "does not hide hand-offs: first tokens wait for it"
    return Section(
        "The link between prefill and decode",
        f"A token's KV is {bytes_per_token:,} bytes. A prefill worker makes up to {most / 1e6:.3g} MB of it a second. "
        f"The link that was measured here has {costs.link_bytes_per_s / 1e6:.3g} MB/s, {share:.2g} times as much, and "
        f"{verdict}. With x prefill workers on one link it needs x times as much.",
        "Bytes from the model's configuration and KV layout, prefill times and link from the calibration. The needed "
        "bandwidth carries the KV in the time of the prefill.",
        (Table(("prompt tokens", "KV, MiB", "prefill, ms", "needed, MB/s", "Gb/s", "transfer here, ms"), tuple(rows)),),
        notes=notes,
    )
