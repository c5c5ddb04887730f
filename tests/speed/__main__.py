"""Counts the work of all scenarios, each in a process that has done nothing else before.

python -m tests.speed            what has changed against the stored values
python -m tests.speed --store    store today's values: say in the commit why a value has grown
python -m tests.speed --json     print today's values
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.speed import comparing


def measure() -> comparing.Values:
    from tests.speed.scenarios import SCENARIOS

    with tempfile.TemporaryDirectory() as directory:
        return {name: counts for scenario in SCENARIOS for name, counts in scenario(Path(directory))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="Store today's values.")
    parser.add_argument("--json", action="store_true", help="Print today's values.")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") is None:
        os.execve(sys.executable, [sys.executable, "-m", "tests.speed", *sys.argv[1:]], comparing.environment())
    values = measure()
    if arguments.json:
        print(json.dumps(values))
        return 0
    changes = comparing.changes(comparing.stored(), values)
    print("\n".join(changes) or "no counter differs by more than 5 %")
    if arguments.store:
        comparing.store(values)
    return 1 if changes and not arguments.store else 0


if __name__ == "__main__":
    sys.exit(main())
