"""A data-parallel group of two vLLM ranks with experts in common, over two vLLM engines behind the router.

    .venv-vllm/bin/python -m benchmarks.vllm_dp MODEL [--at-once 8 32] [--rounds 3]

MODEL has experts, e.g. the small random one of ``python -m tests.system.random_models moe DIRECTORY``. Three servers
take turns: two engines that hold all experts each, two ranks that hold half of the experts each (``--dp 2 --ep``), and
two ranks that hold a part of each expert (``--dp 2``). All run all the time; an idle group sleeps. Each rank or engine
computes on a core of its own. No prompt comes twice to a server. Medians of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.vllm_steps import COLUMNS, load_parser, print_table, throughputs, worker

ENGINES = "two engines"
FLAGS = {ENGINES: "--decode 2", "dp 2, experts spread": "--dp 2 --ep", "dp 2, experts cut": "--dp 2"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(at_once=[8, 32])
    given = parser.parse_args(arguments)
    commands = {name: worker(given, flags) for name, flags in FLAGS.items()}
    print_table(throughputs(given, commands, ENGINES), COLUMNS)


if __name__ == "__main__":
    main()
