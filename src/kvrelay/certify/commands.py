"""``kvrelay certify`` and ``kvrelay doctor``: options in, a table and an exit code out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cli.options import engine_option, json_option, serve_flags_option, served_name_option
from kvrelay.errors import InvalidInputError

if TYPE_CHECKING:
    from kvrelay.certify.run import CertifyOptions

TRANSPORTS = ("nixl", "shm", "p2p")
ORDERS = ("decode-first", "prefill-first")


@click.command("certify")
@click.argument("model", required=False)
@engine_option
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    help="Transport; may be repeated.  [default: nixl]",
)
@click.option(
    "--order", "orders", multiple=True, type=click.Choice(ORDERS), help="Order; may be repeated.  [default: both]"
)
@click.option(
    "--tp-prefill", type=click.IntRange(1, 64), default=1, help="Tensor-parallel ranks of the prefill worker."
)
@click.option("--tp-decode", type=click.IntRange(1, 64), default=1, help="Tensor-parallel ranks of the decode worker.")
@click.option("--pp-prefill", type=click.IntRange(1, 64), default=1, help="Pipeline stages of the prefill worker.")
@click.option("--pp-decode", type=click.IntRange(1, 64), default=1, help="Pipeline stages of the decode worker.")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, help="Tokens per KV block.")
@click.option("--dtype", default="auto", help="Type of weights and KV.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where KV lies; auto: on GPUs if there are any.",
)
@click.option("--ucx-tls", default="auto", help="UCX transports, as of kvrelay worker.")
@click.option(
    "--only",
    "groups",
    multiple=True,
    type=click.Choice(["right", "fast", "holds"]),
    help="Only these rows; may be repeated.  [default: all]",
)
@click.option("--short", "is_short", is_flag=True, help="Fewer prompts, hand-offs and failures: minutes on two cores.")
@click.option("--url", help="A pair that runs already, by the URL of its API. Default: start a cluster.")
@click.option("--reference-url", help="With --url: one server of that model, without hand-offs. Default: none.")
@serve_flags_option
@click.option("--api-key", envvar="KVRELAY_API_KEY", help="Key of these servers. Default: none.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certify"),
    help="Directory of the report; an interrupted run that is there goes on.",
)
@served_name_option
@json_option
def certify_command(as_json: bool, **given: Any) -> int:
    """Prove that prefill and decode apart are right and fast on this machine, and hold, with MODEL (a checkpoint
    directory or hub id; default: the bundled one).

    Example: kvrelay certify ./model --transport nixl --tp-prefill 2 --short --serve-flags "--num-blocks 2048"

    \b
    kvrelay certify --short                              the bundled model, minutes on two cores
    kvrelay certify ./model --engine vllm                vLLM computes
    kvrelay certify --url URL --reference-url URL        a pair that runs already, and one server alone
    """
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import print_result
    from kvrelay.certify.page import text_of
    from kvrelay.certify.run import PAGE, Certification

    options = _options(**given)
    with progress_bar(not as_json) as bar:
        certification = Certification(options, bar)
        if certification.num_done:
            click.echo(f"going on from {options.output}: {certification.num_done} parts are done", err=True)
        report = certification.run()
    print_result(report, f"{text_of(report)}\n\n{options.output / PAGE}", as_json)
    return report.exit_code


def _options(
    model: str | None,
    engine_kind: str,
    served_model_name: str | None,
    transports: tuple[str, ...],
    orders: tuple[str, ...],
    groups: tuple[str, ...],
    url: str | None,
    reference_url: str | None,
    **given: Any,
) -> CertifyOptions:
    """Raises InvalidInputError, CheckpointError."""
    from kvrelay.bench.commands.options import command_line
    from kvrelay.certify.findings import Group
    from kvrelay.certify.run import CertifyOptions
    from kvrelay.launch.models import resolve_model, served_name

    if (url is None) != (reference_url is None):
        raise InvalidInputError("--url and --reference-url go together: a pair, and one server alone", param="url")
    path = resolve_model(model)
    tp, pp = ((given.pop(f"{name}_prefill"), given.pop(f"{name}_decode")) for name in ("tp", "pp"))
    return CertifyOptions(
        model=f"{url} beside {reference_url}" if url else served_name(model, path, served_model_name),
        model_path=path,
        engine=engine_kind,
        transports=transports or ("nixl",),
        orders=orders or ORDERS,
        groups=tuple(Group(name.capitalize()) for name in groups) or tuple(Group),
        urls=(url, reference_url) if url and reference_url else None,
        gpus=_gpus(given["device"]),
        command=command_line(),
        tp=tp,
        pp=pp,
        **given,
    )


def _gpus(device: str) -> tuple[int, int] | None:
    """The giver's and the taker's, two unlike ones if there are two; None: host memory."""
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return (0, int(count > 1)) if device == "cuda" or (device == "auto" and count) else None
