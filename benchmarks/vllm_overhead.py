"""What kvrelay costs over vLLM: vLLM's own server, with and without kvrelay in front of it, and vLLM in a kvrelay
worker, in turn, in one run.

    .venv-vllm/bin/python -m benchmarks.vllm_overhead MODEL [--rounds 3] [--at-once 1 16] [--output-tokens 64]

One vLLM server runs all the time; ``kvrelay serve --engine openai`` stands in front of it. ``kvrelay serve --engine
vllm`` has a vLLM of its own, which computes on the same cores while the other one is idle. Each turn sends prompts of
its own, so that none is in a cache. The last two columns are the ratio of throughput to vLLM's own server, and the
additional time to the first token, by the medians of the rounds. A turn has ``--requests`` for each of up to four
requests at once.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from benchmarks.loads import FIRST
from benchmarks.vllm_steps import load_parser, plain, print_table, throughputs, worker

COLUMNS = {
    "at once": "at_once",
    "case": "case",
    "tok/s": "output_tokens_per_s:.0f",
    "TTFT P50 ms": "ttft_p50_s:ms",
    "ITL P50 ms": "itl_p50_s:ms",
    "failed": "failed:.0f",
    "throughput": "throughput:.3f",
    "first token ms": "added_ttft_s:ms+.1f",
}
PLAIN, FRONT, WITHIN = "vLLM", "kvrelay in front of it", "vLLM in kvrelay"


def commands(given: argparse.Namespace) -> dict[str, str]:
    serve = f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(given.model)} --port {{port}}"
    return {
        PLAIN: f"{plain(given)} {given.vllm_args}",
        FRONT: f"{serve} --engine openai --upstream {FIRST}",
        WITHIN: worker(given, ""),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(at_once=[1, 16], requests=12, input_tokens=128, dtype="bfloat16")
    parser.add_argument("--vllm-args", default="", help="further arguments of vLLM's own server")
    given = parser.parse_args(arguments)
    rows = throughputs(given, commands(given), PLAIN, lambda at_once: max(at_once, given.requests * min(at_once, 4)))
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
