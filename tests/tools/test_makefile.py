"""What the two targets of a first hour need, their environment has: it is smaller than the one that tests run in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.smollm2 import MEMBER

ROOT = Path(__file__).parents[2]


def test_serving_installs_what_the_chats_model_is_read_with() -> None:
    """``make chat`` once asked a newcomer to install gguf, and no test could see it: theirs had it."""
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", "serving"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    extras = re.findall(r"-e '\.\[([a-z,]*)\]'", commands)
    assert MEMBER.endswith(".gguf")
    assert extras == ["gguf"]
