"""Settings that change while a router runs."""

from __future__ import annotations

import pytest

from kvrelay.config import RouterConfig
from kvrelay.errors import ConfigError
from kvrelay.router import RuntimeSettings


def test_run_time_values_override_start_values() -> None:
    started = RouterConfig(router="random", decode_weight=0.5, router_seed=7)
    settings = RuntimeSettings()
    assert settings.apply(started) == started
    settings.put("router", "kv")
    settings.put("overlap_weight", "2.5")
    settings.put("temperature", 1)
    assert settings.apply(started) == RouterConfig(
        router="kv", overlap_weight=2.5, decode_weight=0.5, temperature=1.0, router_seed=7
    )
    assert settings.get("overlap_weight") == 2.5
    settings.remove("router")
    settings.remove("never set")
    assert settings.apply(started).router == "random"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("router", "kw", "must be one of"),
        ("overlap_weight", "-1", "between 0 and"),
        ("overlap_weight", "1e308", "between 0 and"),
        ("decode_weight", "1e308", "between 0 and"),
        ("temperature", "1e308", "between 0 and"),
        ("overlap_weight", "nan", "finite"),
        ("decode_weight", "inf", "finite"),
        ("temperature", "hot", "must be float"),
        ("temperature", None, "must have a value"),
        ("temperature", True, "must be float"),
        ("overlap_wait", "1", "did you mean overlap_weight"),
        ("router_seed", "1", "cannot be set at run time"),
    ],
)
def test_invalid_values_are_refused_and_change_nothing(name: str, value: object, message: str) -> None:
    settings = RuntimeSettings()
    settings.put("overlap_weight", 0.25)
    with pytest.raises(ConfigError, match=message):
        settings.put(name, value)
    assert settings.apply(RouterConfig()) == RouterConfig(overlap_weight=0.25)
