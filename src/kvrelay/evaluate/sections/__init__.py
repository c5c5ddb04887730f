"""The questions of an evaluation, one module each: ``wishes`` says what it would measure, ``take`` measures or
simulates it, and ``section_of``, which is pure, makes its section."""

SECTIONS = ("sizes", "ratios", "larger", "chunks", "loads", "transfers", "policies", "groups", "prefixes")
"""That may be left out, in the order of the report."""
BY_IMPORTANCE = ("sizes", "larger", "prefixes", "chunks", "transfers", "groups", "policies", "loads", "ratios")
"""Which get time first if there is not enough; of many points some can be missed."""
NOT_SHORT = ("ratios",)
"""Left out of a short run, unless named."""
