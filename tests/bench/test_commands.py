"""The command line: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrelay.bench.commands import bench_group
from kvrelay.bench.commands.options import DATASETS, command_line
from kvrelay.bench.formats import FileFormat
from kvrelay.bench.load.datasets import DatasetKind
from kvrelay.errors import InvalidInputError, KvrelayError

Scripted = Callable[..., Any]


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(bench_group, [str(argument) for argument in arguments])


def good(*arguments: str | Path) -> str:
    result = bench(*arguments)
    assert result.exception is None, result.exception
    return result.stdout


def failure(*arguments: str | Path) -> KvrelayError:
    """The error that the command line turns into one line and an exit code."""
    error = bench(*arguments).exception
    assert isinstance(error, KvrelayError), error
    assert "\n" not in error.message
    return error


def test_every_command_has_help_with_an_example() -> None:
    assert {"serve", "sweep", "interference", "prefixes", "compare", "engine", "transfer"} == set(bench_group.commands)
    for name in bench_group.commands:
        assert "Example: kvrelay bench" in good(name, "--help")


def test_choices_of_the_command_line_are_the_rooms() -> None:
    assert list(DATASETS) == [kind.value for kind in DatasetKind]
    (fmt,) = [p for p in bench_group.commands["prefixes"].params if p.name == "fmt"]
    assert list(fmt.type.choices) == [kind.value for kind in FileFormat]  # type: ignore[attr-defined]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvrelay.bench.commands\n"
        "print([m for m in ('numpy', 'rich', 'httptools', 'matplotlib', 'msgspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"


def test_prefixes_command(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("".join(f"the same beginning {n}\n" for n in range(12)))
    plot = tmp_path / "plot.png"
    options = ("--min-length", "5", "--cache-blocks", "1,10", "--block-size", "8")
    found = json.loads(good("prefixes", path, *options, "--json", "--plot", plot))
    assert (found["conversations"], found["shared_prefixes"], found["top"][0]["count"]) == (12, 1, 12)
    assert [cache["num_blocks"] for cache in found["caches"]] == [None, 1, 10]
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = good("prefixes", path, *options)
    assert "the same beginning " in text
    assert "LRU 10" in text


def test_serve_writes_reports_and_compares(scripted: Scripted, tmp_path: Path) -> None:
    first, plot = tmp_path / "first.json", tmp_path / "run.png"
    with scripted(gap_s=0.001) as server:
        options = ("--base-url", server.url, "--num-prompts", "5", "--output-len", "4", "--max-concurrency", "2")
        text = good("serve", *options, "--output", first, "--slo", "ttft=10000", "--plot", plot, "--percentiles")
        assert "Successful requests:                        5" in text
        assert "P95 E2E latency" in text
        compared = good("serve", *options, "--compare", first)
        printed = json.loads(good("serve", *options, "--json", "--endpoint", "chat", "--dataset", "readable-prefix"))
    report = json.loads(first.read_text())
    assert report["total"]["output_tokens"] == 20
    assert report["total"]["goodput"]["share"] == 1
    assert report["info"]["model"] == "scripted"
    assert printed["info"]["endpoint"] == "/v1/chat/completions"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "this run" in compared
    assert "ratio" in compared
    assert "TTFT median ms" in good("compare", first, first)


def test_serve_mix_has_a_section_per_class(scripted: Scripted) -> None:
    with scripted() as server:
        text = good("serve", "--base-url", server.url, "--mix", "chat=4/3:closed=2:n=4,long=50/2:rate=200:n=3")
    assert "Class chat" in text
    assert "Class long" in text


def test_failed_runs_save_what_there_is(scripted: Scripted, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with scripted(mode="refuse") as server:
        error = failure("serve", "--base-url", server.url, "--num-prompts", "2", "--warm-up", "0", "--output", output)
        warm = failure("serve", "--base-url", server.url, "--num-prompts", "2")
    assert (error.exit_code, error.message) == (1, "no request succeeded: HTTP 503: too many requests")
    assert "warm-up" in warm.message
    assert json.loads(output.read_text())["total"]["failed"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "above zero"),
        (["--request-rate", "-2"], "above zero"),
        (["--max-concurrency", "0"], "above zero"),
        (["--num-prompts", "-1"], "above zero"),
        (["--duration", "0"], "above zero"),
        (["--dataset", "nonsense"], "unknown data set"),
        (["--dataset", "sharegpt"], "sharegpt=FILE"),
        (["--dataset", "random=x"], "given as random"),
        (["--dataset", "jsonl=/no/such/file"], "cannot read"),
        (["--slo", "fast"], "--slo"),
        (["--compare", "/no/such/file"], "cannot read"),
        (["--tokenizer", "/no/such/file"], "no tokenizer"),
        (["--extra-body", "x"], "JSON object"),
        (["--vocab-size", "3"], "no ordinary token"),
    ],
)
def test_wrong_use_is_one_line(scripted: Scripted, arguments: list[str], message: str) -> None:
    with scripted() as server:
        error = failure("serve", "--base-url", server.url, "--num-prompts", "1", *arguments)
    assert isinstance(error, InvalidInputError)
    assert message in error.message


def test_server_that_is_down() -> None:
    error = failure("serve", "--base-url", "http://127.0.0.1:9")
    assert error.exit_code == 1
    assert "no connection to http://127.0.0.1:9" in error.message


def test_compare_refuses_other_files(tmp_path: Path) -> None:
    other = tmp_path / "x.json"
    other.write_text('{"a": 1}')
    assert failure("compare", other).exit_code == 2


def test_sweep_command(scripted: Scripted, tmp_path: Path) -> None:
    with scripted() as server:
        arguments = ("sweep", "--case", f"one={server.url}", "--output-len", "2", "--duration", "0.3", "--warm-up", "1")
        text = good(*arguments, "--rates", "20", "--no-knee", "--slo", "ttft=9999", "--output-dir", tmp_path)
    assert "| one | 20 |" in text
    assert json.loads((tmp_path / "sweep.json").read_text())["cases"][0]["points"][0]["good"] is True
    assert {"sweep.md", "sweep.png", "sweep.json"} <= {path.name for path in tmp_path.iterdir()}
    assert failure("sweep", "--case", "one=http://x", "--rates", "-1").exit_code == 2
    error = failure("sweep", "--case", "gone=http://127.0.0.1:9", "--output-dir", tmp_path)
    assert "case gone: no connection" in error.message
    assert "knee of gone: unknown: no connection" in (tmp_path / "sweep.md").read_text()


def test_interference_command(scripted: Scripted, tmp_path: Path) -> None:
    options = ("--only-given", "--mix", "chat=4/6:closed=2,long=30/2:rate=30", "--duration", "0.3", "--rounds", "2")
    with scripted(gap_s=0.002) as server:
        peers = ("--url", f"a={server.url}", "--url", f"b={server.url}")
        text = good("interference", *options, *peers, "--output-dir", tmp_path, "--warm-up", "1")
    assert "| a |" in text
    report = json.loads((tmp_path / "interference.json").read_text())
    assert [run["case"] for run in report["runs"]] == ["a", "b", "b", "a"]
    assert report["summaries"][0]["chat_itl_p50_s"] > 0.001
    dead = ("--url", "dead=http://127.0.0.1:9")
    assert "turns failed: no connection" in failure("interference", *options, *dead, "--output-dir", tmp_path).message
    assert failure("interference", "--only-given").exit_code == 2
    assert "two classes" in failure("interference", "--mix", "a=1/1:closed=1").message


@pytest.mark.parametrize("words", [["--api-key", "secret"], ["--api-key=secret"], ["--api-key=secret=x"]])
def test_a_reported_command_line_shows_no_key(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvrelay", "bench", "serve", *words, "--rate", "1"])
    assert "secret" not in command_line()
    assert command_line().endswith(" --rate 1")
    assert "..." in command_line()
