"""The cells of ``kvrelay certify`` on GPUs: the command that whoever has a device runs, shortened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.system.serving import kvrelay

torch = pytest.importorskip("torch")

from kvrelay.certify.findings import CertifyReport, Verdict  # noqa: E402

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.system,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device"),
]


@pytest.mark.parametrize(("tp_prefill", "tp_decode"), [(1, 1), (2, 1), (1, 2)])
def test_nothing_fails_but_times_on_a_machine_in_use(tp_prefill: int, tp_decode: int, tmp_path: Path) -> None:
    if max(tp_prefill, tp_decode) > NUM_DEVICES:
        pytest.skip(f"there are {NUM_DEVICES} CUDA devices")
    ranks = ("--tp-prefill", str(tp_prefill), "--tp-decode", str(tp_decode))
    flags = ("--device", "cuda", "--dtype", "float32", "--serve-flags", "--num-blocks 512")
    kvrelay("certify", "--short", *ranks, *flags, "--output", str(tmp_path), timeout_s=1700)
    report = msgspec.json.decode((tmp_path / "certify.json").read_bytes(), type=CertifyReport)
    assert report.is_complete
    failed = [f"{row.key}: {row.reason}" for row in report.rows if row.verdict is Verdict.FAIL]
    assert not failed
    assert any(row.verdict is Verdict.PASS for row in report.rows)
