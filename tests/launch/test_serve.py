"""The start of ``serve``, without processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import FatalError
from kvrelay.launch.serve import Cluster, ServeOptions


def options(model_path: Path) -> ServeOptions:
    return ServeOptions(
        model_path=model_path,
        model_name="tiny",
        num_prefill=1,
        num_decode=1,
        num_engines=1,
        num_frontends=1,
        frontend=FrontendConfig(port=0),
        control=ControlConfig(),
        metrics=MetricsConfig(),
        worker_flags=[[], []],
        frontend_flags=[],
        control_flags=[],
        nats_dir=None,
        start_timeout_s=300.0,
        drain_timeout_s=0.0,
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
async def test_a_broken_tokenizer_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Frontends would try again until the start timeout, and ``serve`` would wait for them."""
    path = Path(shutil.copytree(bundled_checkpoint_path(), tmp_path / "model"))
    (path / name).write_text("{% for")
    cluster = Cluster(options(path))
    steps = Mock()
    monkeypatch.setattr("kvrelay.launch.serve.on_terminate", lambda stop: None)
    monkeypatch.setattr(cluster, "_start", AsyncMock(side_effect=steps.start))
    monkeypatch.setattr(cluster, "_until_ready", AsyncMock(side_effect=steps.wait))
    monkeypatch.setattr(cluster, "_shut_down", AsyncMock(side_effect=steps.stop))
    with pytest.raises(FatalError) as caught:
        await cluster.run()
    assert str(path / name) in caught.value.message
    assert caught.value.exit_code == 1
    assert [call[0] for call in steps.method_calls] == ["start", "stop"]
