"""Small files that a user names: a device has no end, and a pipe no size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.bench.report.files import read_serve_report
from kvrelay.config.files import read_file
from kvrelay.config.loading import read_config_file
from kvrelay.control.tls import TlsFiles
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.sections.link import read_certificate
from kvrelay.simulate.costs import read_costs


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_config_file(path, []),
        lambda path: TlsFiles("control", ca=str(path)).pem(),
        read_costs,
        read_certificate,
        read_serve_report,
    ],
)
def test_a_device_without_an_end_is_refused(read: Callable[[Path], object]) -> None:
    with pytest.raises(InvalidInputError, match="above 67,108,864 bytes"):
        read(Path("/dev/zero"))


def test_a_file_as_large_as_the_limit_and_a_pipe_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_file(file, 3) == b"abc"
    with pytest.raises(OSError, match="above 2 bytes"):
        read_file(file, 2)
    out, into = os.pipe()
    writer = threading.Thread(target=lambda: [os.write(into, b"a" * 70_000), os.close(into)])
    writer.start()
    assert read_file(f"/dev/fd/{out}") == b"a" * 70_000
    writer.join()
    os.close(out)
