"""How often tests reach into private attributes: every such access breaks when a room is re-cut.

    python tools/private_access.py [--max N] [--names] [PATH ...]

Counts ``x._name`` in Python files, but for ``self`` and ``cls``, dunder names, and the public methods of named tuples.
Prints a count for each file, and the sum. ``--names`` counts by attribute instead. ``--max N``: exit status 1 if the
sum is above N, so that the number can only fall.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NOT_PRIVATE = frozenset({"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit"})
"""Of named tuples, and ``os._exit``."""
OWNERS = frozenset({"self", "cls"})


def private_accesses(tree: ast.AST) -> Iterator[str]:
    """The names of the private attributes that the code reads or writes on other objects."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_dunder = node.attr.startswith("__") and node.attr.endswith("__")
        is_own = isinstance(node.value, ast.Name) and node.value.id in OWNERS
        if not (is_dunder or is_own or node.attr in NOT_PRIVATE):
            yield node.attr


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("tests")], metavar="PATH")
    parser.add_argument("--max", type=int, default=None, metavar="N", help="Limit of the sum.")
    parser.add_argument("--names", action="store_true", help="Count by attribute, not by file.")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for path in options.paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            names = list(private_accesses(ast.parse(file.read_text(), str(file))))
            counts.update(names if options.names else [str(file)] * len(names))
    for name, count in counts.most_common():
        print(f"{count:5}  {name}")
    total = counts.total()
    print(f"{total:5}  in all")
    if options.max is not None and total > options.max:
        print(f"{total} private accesses; at most {options.max} are allowed: use a public seam", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
