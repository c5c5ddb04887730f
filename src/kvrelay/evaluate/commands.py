"""``kvrelay evaluate``: options in, a report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cli.options import engine_option, json_option, model_argument, serve_flags_option
from kvrelay.config import DisaggConfig
from kvrelay.evaluate.sections import NOT_SHORT, SECTIONS

if TYPE_CHECKING:
    from kvrelay.evaluate.options import EvaluateOptions

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_USUAL = {"slo_ttft_ms": DisaggConfig().slo_ttft_ms, "slo_itl_ms": DisaggConfig().itl_ms}


@click.command("evaluate")
@model_argument
@engine_option
@click.option(
    "--trace",
    type=_FILE,
    help="Load: a trace (Mooncake, Qwen-Bailian, Azure, BurstGPT), log or recording; default: none.",
)
@click.option(
    "--load",
    "load_spec",
    help="Generated load, as of kvrelay advise.  [default: poisson, at half of the rate that was measured]",
)
@click.option(
    "--time-scale", type=click.FloatRange(0.0, min_open=True), default=1.0, help="2: the trace twice as fast."
)
@click.option("--slots", type=click.IntRange(2, 64), default=2, help="Number of GPUs (or other slots) to decide about.")
@click.option(
    "--slo-ttft-ms",
    type=click.FloatRange(1.0),
    help=f"Objective for the first token, in ms.  [default: {_USUAL['slo_ttft_ms']:g}, or what this machine can hold]",
)
@click.option(
    "--slo-itl-ms",
    type=click.FloatRange(1.0),
    help=f"Objective between tokens, in ms.  [default: {_USUAL['slo_itl_ms']:g}, or what this machine can hold]",
)
@click.option("--price", type=click.FloatRange(0.0, min_open=True), help="Of one slot for an hour; default: none.")
@click.option(
    "--dataset",
    "datasets",
    multiple=True,
    type=_FILE,
    help="Conversations (as of kvrelay bench prefixes): their prefixes, and as a load; may be repeated. Default: none.",
)
@click.option("--certificate", type=_FILE, help="certify.json of kvrelay certify, to compare its link; default: none.")
@serve_flags_option
@click.option(
    "--section",
    "sections",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Besides the answer and what it needs only this section; may be repeated.  [default: all, but no ratios with "
    "--short]",
)
@click.option("--short", "is_short", is_flag=True, help="Fewer points and rounds: within 10 minutes on two cores.")
@click.option("--resume", "resumes", is_flag=True, help="Go on from the cases that --output-dir has.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of load and draws.")
@click.option(
    "--output-dir",
    "output",
    type=click.Path(path_type=Path),
    default=Path("evaluate"),
    help="Directory of the report, the cases and the logs.",
)
@json_option
def evaluate_command(as_json: bool, resumes: bool, **given: Any) -> int:
    """Should prefill and decode be apart, for MODEL, this load and these machines? Measures what fits on this machine,
    calibrates the simulator with it, simulates the rest, and writes one report, evaluate.html and evaluate.json.

    Example: kvrelay evaluate ./model --trace day.csv --slots 8 --slo-ttft-ms 500 --slo-itl-ms 25 --price 2.5

    \b
    kvrelay evaluate --short                    the bundled model, within 10 minutes on two cores
    kvrelay evaluate ./model --engine vllm      vLLM computes
    kvrelay evaluate ./model --resume           go on after Ctrl-C
    """
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import print_result
    from kvrelay.evaluate.page import text_of
    from kvrelay.evaluate.run import PAGE, check_output, evaluate, how_to_go_on

    options = _options(**given)
    check_output(options.output)
    try:
        with progress_bar(not as_json) as bar:
            report = evaluate(options, bar, resumes=resumes)
    except KeyboardInterrupt:
        click.echo(f"interrupted; what is done is kept. Go on with: {how_to_go_on(options.command)}", err=True)
        raise
    print_result(report, f"{text_of(report)}\n\n{options.output / PAGE}", as_json)
    return 0


def _options(model: str | None, engine_kind: str, sections: tuple[str, ...], **given: Any) -> EvaluateOptions:
    """Raises InvalidInputError, CheckpointError."""
    from kvrelay.bench.commands.options import command_line
    from kvrelay.errors import InvalidInputError
    from kvrelay.evaluate.options import DEFAULT_LOAD, OBJECTIVES, EvaluateOptions
    from kvrelay.launch.models import resolve_model, served_name

    if given["trace"] is not None and given["load_spec"] is not None:
        raise InvalidInputError("give either --trace FILE or --load SPEC, not both", param="load")
    unset = tuple(name for name in OBJECTIVES if given[name] is None)
    given |= {name: _USUAL[name] for name in unset}
    if given["trace"] is None and given["load_spec"] is None:
        given["load_spec"], unset = DEFAULT_LOAD, ("load_spec", *unset)
    path = resolve_model(model)
    return EvaluateOptions(
        model=served_name(model, path, None),
        model_path=path,
        engine=engine_kind,
        unset=unset,
        sections=sections or tuple(one for one in SECTIONS if not given["is_short"] or one not in NOT_SHORT),
        command=command_line(),
        **given,
    )
