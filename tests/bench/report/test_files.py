"""Results on disk: whole or not at all, and only a file is ever replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvrelay.bench.report.files import write_text


def test_a_file_is_replaced_and_a_link_written_through(tmp_path: Path) -> None:
    link, file = tmp_path / "new" / "latest.json", tmp_path / "run.json"
    write_text(file, "a")
    link.parent.mkdir()
    link.symlink_to(file)
    write_text(link, "b")
    assert link.is_symlink()
    assert file.read_text() == "b\n"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "run.json"}


def test_a_pipe_or_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """Root may replace even /dev/null, which every program of that machine needs."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "a report")
    assert pipe.is_fifo()
    reader.join()
    assert found == ["a report\n"]
