"""Settings: ranges, precedence of file, environment and flags, unknown keys."""

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    FrontendConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
    load_settings,
)
from kvrelay.config.loading import cache_directory, read_config_file, settings_to_flags, state_directories
from kvrelay.config.worker import WorkerConfig
from kvrelay.errors import ConfigError

ALL = [
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    FrontendConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
]


def test_field_names_are_unique_over_all_rooms_since_they_are_flags():
    names = [item.name for cls in ALL for item in dataclasses.fields(cls)]
    assert len(names) == len(set(names))


def test_every_field_has_help_and_every_class_a_section():
    assert len({cls.section for cls in ALL}) == len(ALL)
    for cls in ALL:
        assert all(item.metadata["help"] for item in dataclasses.fields(cls))


def test_flags_win_over_environment_over_file():
    values = {"block_size": 8, "max_num_seqs": 8, "max_num_waiting": 8}
    environ = {"KVRELAY_BLOCK_SIZE": "32", "KVRELAY_MAX_NUM_SEQS": "32"}
    config = load_settings(EngineConfig, file_values=values, environ=environ, flags={"block_size": 64})
    assert (config.block_size, config.max_num_seqs, config.max_num_waiting) == (64, 32, 8)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (EngineConfig, {"block_size": 0}, "block_size must be between 1 and 1024, got 0"),
        (EngineConfig, {"block_size": "big"}, "block_size must be int, got 'big'"),
        (EngineConfig, {"block_sise": 16}, "did you mean block_size"),
        (EngineConfig, {"enable_prefix_caching": "maybe"}, "true or false"),
        (RunnerConfig, {"dtype": "int4"}, "dtype must be one of auto, float32, bfloat16, float16"),
        (DisaggConfig, {"max_local_prefill_length": 1.5}, "must be int"),
        (FrontendConfig, {"port": 70000}, "between 0 and 65535"),
        (ControlConfig, {"lease_ttl_s": float("nan")}, "lease_ttl_s"),
    ],
)
def test_invalid_settings_are_refused(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(cls, file_values=values, environ={})


def test_flags_rebuild_the_settings():
    config = EngineConfig(block_size=32, enable_prefix_caching=False)
    assert settings_to_flags(config) == ["--block-size", "32", "--no-enable-prefix-caching"]
    assert settings_to_flags(EngineConfig()) == []


def test_config_file(tmp_path):
    file = tmp_path / "kvrelay.yaml"
    file.write_text("engine:\n  block_size: 32\n")
    assert read_config_file(file, [EngineConfig]) == {"engine": {"block_size": "32"}}
    file.write_bytes("engine:\r\n  block_size: 32\r\n".encode("utf-8-sig"))
    assert read_config_file(file, [EngineConfig]) == {"engine": {"block_size": "32"}}
    for text, message in [
        ("engin:\n  block_size: 1\n", "unknown section engin .*did you mean engine"),
        ("- 1\n", "does not hold sections"),
        ("engine: 3\n", "not a mapping"),
        ("engine: [\n", "cannot read"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config_file(file, [EngineConfig])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api_key:", {}),
        ("api_key: ~", {}),
        ("api_key: 'null'", {"api_key": "null"}),
        ("api_key: 0123", {"api_key": "0123"}),
        ("api_key: 2026-02-30", {"api_key": "2026-02-30"}),
        ("host: yes", {"host": "yes"}),
        ("access_log: off", {"access_log": "off"}),
        ("share_prefix_cache: on", {"share_prefix_cache": True}),
        ("port: 9000", {"port": 9000}),
        ("request_timeout_s: 1.5", {"request_timeout_s": 1.5}),
        ("", {}),
    ],
)
def test_a_value_in_the_file_means_what_it_means_as_a_flag(text: str, expected: dict[str, object], tmp_path: Path):
    """YAML's own types would make a key of no value the text None, 83 of 0123, and False of off."""
    file = tmp_path / "kvrelay.yaml"
    file.write_text(f"frontend:\n  {text}\n")
    values = read_config_file(file, [FrontendConfig])["frontend"]
    assert load_settings(FrontendConfig, file_values=values, environ={}) == FrontendConfig(**expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allowed_origins: [a, b]", "allowed_origins must be str, got .'a', 'b'."),
        ("host: {a: b}", "host must be str"),
        ("1: 2", "unknown setting frontend.1"),
        ("? [1]\n  : 2", "cannot read configuration file"),
        ("port: !!int x", "cannot read configuration file"),
        ("port: 1\n  port: 2", "port stands twice .*line 3"),
        ("port: 1\nfrontend:\n  host: a", "frontend stands twice .*line 3"),
        ("host: " + "[" * 5000, "cannot read configuration file"),
    ],
)
def test_what_is_no_setting_in_a_file_is_refused_in_one_sentence(text: str, message: str, tmp_path: Path):
    file = tmp_path / "kvrelay.yaml"
    file.write_text(f"frontend:\n  {text}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(FrontendConfig, file_values=read_config_file(file, [FrontendConfig])["frontend"], environ={})


@pytest.mark.parametrize("name", ["m" * 1025, "caf\udce9", "two\nlines"])
def test_a_name_that_no_request_can_have_is_refused_at_start(name: str):
    """Else discovery refuses each worker's entry, and the cluster is never ready."""
    with pytest.raises(ConfigError, match="--served-model-name"):
        WorkerConfig(model_path=Path(), model=name)
    with pytest.raises(ConfigError, match="move the checkpoint"):
        WorkerConfig(model_path=Path("/models", name), model="short")
    assert WorkerConfig(model_path=Path(), model="m" * 1024).model == "m" * 1024
    assert WorkerConfig(model_path=Path(), model="模型 é/\N{NO-BREAK SPACE}").model.startswith("模型")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's temporary directory; nothing names others."""
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"kvrelay-{os.getuid()}"


def test_a_user_without_a_home_has_directories_below_the_temporary_one(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with --user 12345: neither HOME nor an entry in passwd."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory() == own / ".cache/kvrelay"
    assert state_directories() == [own / ".local/state/kvrelay"]
    own.chmod(0o770)
    with pytest.raises(ConfigError, match="set HOME"):
        cache_directory()


def test_a_home_that_is_read_only_is_none(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume in it counts."""
    (tmp_path / "home/.cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name == ".cache")
    assert cache_directory() == tmp_path / "home/.cache/kvrelay"
    assert state_directories() == [own / ".local/state/kvrelay"]
