"""A peer of the tests: it says each line again; "end" ends it with a reason."""

import sys

from kvrelay.bench.peer import say

say(b"here")
for line in sys.stdin.buffer:
    if line == b"end\n":
        sys.exit("first line\nthe reason")
    say(line.strip())
