"""``kvrelay bench interference``: what separation buys, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import FILE, body_options

DEFAULT_MIX = "chat=64/128:closed=8,long=1024/8:rate=3"


@click.command("interference")
@click.argument("model_dir", required=False, metavar="[MODEL]")
@click.option("--mix", default=DEFAULT_MIX, show_default=True, help="Two classes: those who wait, those who disturb.")
@click.option("--rounds", type=int, default=2, show_default=True, help="How often every case has its turn.")
@click.option("--duration", type=float, default=20.0, show_default=True, help="Seconds of sending per turn.")
@click.option("--drain", type=float, default=20.0, show_default=True, help="Seconds that requests in flight then have.")
@click.option("--warm-up", type=int, default=8, show_default=True, help="Unmeasured requests of each class beforehand.")
@click.option("--slo", default="ttft=500,itl=25", show_default=True, help="Objectives for goodput, in ms.")
@click.option("--serve-args", default="", help="Further arguments of every `kvrelay serve`.")
@click.option("--url", "urls", multiple=True, metavar="NAME=URL", help="Another server, already running; repeatable.")
@click.option("--case", "cases", multiple=True, metavar="NAME=COMMAND", help="Another server to start; repeatable.")
@click.option("--only-given", is_flag=True, help="Leave out the four arrangements of kvrelay.")
@body_options
@click.option("--vocab-size", type=int, help="Random token ids stay below this.  [default: 512]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--start-timeout", type=float, default=120.0, show_default=True, help="Seconds until a server is healthy."
)
@click.option("--output-dir", type=FILE, default=Path("bench-results/interference"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the Markdown table.")
def interference_command(**given: Any) -> None:
    """Chats in a closed loop, disturbed by long prompts: aggregated against separated, with the same load.

    Runs aggregated x1, aggregated x2, 1P1D always remote and 1P1D conditional in turns, and whatever is given beside
    them. Writes interference.json, interference.md and interference.png.

    \b
    Example: kvrelay bench interference --rounds 3 --duration 30 --url vllm=http://127.0.0.1:8001
    """
    from kvrelay.bench.interference import measure_interference

    measure_interference(given)
