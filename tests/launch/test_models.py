"""What a model argument may be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvrelay.errors import CheckpointError
from kvrelay.launch.models import resolve_model, served_name


def test_a_file_that_is_no_gguf_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"model\.bin is a file.*a checkpoint is a directory"):
        resolve_model(str(path))


def test_a_gguf_file_is_converted_once_and_found_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started: list[list[str]] = []

    def convert(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        Path(command[-1]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", convert)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF one")
    first = resolve_model(str(path))
    assert first.name == "tiny"
    assert resolve_model(str(path)) == first
    path.write_bytes(b"GGUF two")
    assert resolve_model(str(path)) != first
    assert len(started) == 2
    monkeypatch.setattr("kvrelay.launch.gguf.VERSION", 10**9)
    assert resolve_model(str(path)) not in (first, Path(started[1][-1]))
    assert len(started) == 3


def test_a_gguf_file_that_cannot_be_converted_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(CheckpointError, match=r"cannot convert .*broken\.gguf: \S"):
        resolve_model(str(path))


@pytest.mark.parametrize("model", ["./none", "/nowhere/none", "some/where/none", "none/", "where/none/"])
def test_a_missing_directory_is_refused(model: str) -> None:
    """A hub is not asked for what can only be a path."""
    with pytest.raises(CheckpointError, match=f"checkpoint directory {model} does not exist"):
        resolve_model(model)


def test_the_default_name_is_what_the_user_calls_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM serves a hub model under its id; the name of its directory in the cache is that of a revision."""
    snapshot = tmp_path / "models--org--na-me/snapshots/0123abcd"
    for directory in (tmp_path / "ünï model v2", snapshot):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    (tmp_path / "latest").symlink_to("ünï model v2")
    monkeypatch.chdir(tmp_path)
    for model, name in [("ünï model v2/", "ünï model v2"), ("./latest/", "latest"), (str(snapshot), "org/na-me")]:
        assert served_name(model, resolve_model(model)) == name
        assert served_name(model, resolve_model(model), "given") == "given"
    assert resolve_model("latest") == tmp_path / "ünï model v2", "a link that is moved does not mix two checkpoints"
    monkeypatch.chdir("latest")
    assert served_name(".", resolve_model(".")) == "ünï model v2"
    assert served_name("org/na-me", snapshot) == "org/na-me"
