"""Servers that run already: a sound pair, one with wrong KV, one of another model; and what is done before goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.certify.scripted import Compute, scripted_server, sound

from kvrelay.bench.progress import ProgressBar
from kvrelay.certify import run as run_module
from kvrelay.certify.findings import CertifyReport, Group, Row, Verdict
from kvrelay.certify.run import Certification, CertifyOptions
from kvrelay.data import bundled_checkpoint_path


def options(folder: Path, urls: tuple[str, str] | None = None, **more: object) -> CertifyOptions:
    return CertifyOptions("m", bundled_checkpoint_path(), folder, is_short=True, urls=urls, **more)  # type: ignore[arg-type]


async def certified(folder: Path, compute: Compute, model: str = "m") -> CertifyReport:
    async with scripted_server() as alone, scripted_server(compute, model) as pair:
        certification = Certification(options(folder, (pair, alone), groups=(Group.RIGHT,)), ProgressBar(None))
        return await asyncio.to_thread(certification.run)


def verdicts(report: CertifyReport) -> dict[str, Verdict]:
    return {row.title: row.verdict for row in report.rows}


async def test_a_sound_pair_passes(tmp_path: Path) -> None:
    report = await certified(tmp_path, sound)
    assert verdicts(report) == {
        "greedy answers": Verdict.PASS,
        "logprobs of first tokens": Verdict.PASS,
        "answers under load, with cancellations": Verdict.PASS,
        "KV, block by block": Verdict.SKIP,
        "failures": Verdict.SKIP,
    }
    assert report.exit_code == 0
    assert (tmp_path / "certify.html").is_file()


async def test_wrong_kv_of_long_prompts_is_found_though_every_status_is_200(tmp_path: Path) -> None:
    def wrong(tokens: list[int], number: int) -> int:
        """From 17 tokens on the first block of 16 is another prompt's."""
        return sound(tokens if len(tokens) - number < 17 else [0] * 16 + tokens[16:], number)

    report = await certified(tmp_path, wrong)
    assert verdicts(report)["greedy answers"] is Verdict.FAIL
    assert verdicts(report)["answers under load, with cancellations"] is Verdict.FAIL
    assert report.exit_code == 1


async def test_one_wrong_prompt_is_found_by_asking_again(tmp_path: Path) -> None:
    def wrong(tokens: list[int], number: int) -> int:
        return sound(tokens, number) + (len(tokens) - number == 513)

    report = await certified(tmp_path, wrong)
    (row,) = (row for row in report.rows if row.title == "greedy answers")
    assert row.verdict is Verdict.FAIL
    assert "differ each of 8 times" in row.reason


async def test_servers_of_unlike_models_are_named(tmp_path: Path) -> None:
    report = await certified(tmp_path, sound, model="another")
    (row, *_) = report.rows
    assert row.verdict is Verdict.FAIL
    assert "'another'" in row.reason
    assert "'m'" in row.reason
    assert not any(row.verdict is Verdict.PASS for row in report.rows)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(name: str) -> list[Row]:
        if name == "two" and taken.count("two") == 0:
            taken.append(name)
            raise KeyboardInterrupt
        taken.append(name)
        return [Row(Group.RIGHT, name, "cell", Verdict.PASS, "it is")]

    monkeypatch.setattr(
        Certification, "_units", lambda self: ((name, lambda at=name: take(at)) for name in ("one", "two", "three"))
    )
    with pytest.raises(KeyboardInterrupt):
        Certification(options(tmp_path), ProgressBar(None)).run()
    assert not Certification(options(tmp_path), ProgressBar(None)).report.is_complete
    report = Certification(options(tmp_path), ProgressBar(None)).run()
    assert taken == ["one", "two", "two", "three"]
    assert [row.title for row in report.rows] == ["one", "two", "three"]
    # A run of other options begins anew, and so does one after a complete one.
    assert Certification(options(tmp_path, block_size=32), ProgressBar(None)).num_done == 0
    assert Certification(options(tmp_path), ProgressBar(None)).num_done == 0


async def test_the_noise_of_unlike_ranks_is_that_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine alone has the decode worker's ranks, and its noise those of the prefill worker."""
    started: list[str] = []

    @asynccontextmanager
    async def cluster(flags: list[str], log: Path) -> AsyncIterator[SimpleNamespace]:
        started.append(flags[flags.index("--tp") + 1])
        async with scripted_server(sound if started[-1] == "1" else lambda tokens, number: 7) as url:
            yield SimpleNamespace(url=url)

    monkeypatch.setattr(run_module, "running_cluster", cluster)
    reference = await Certification(options(tmp_path, tp=(2, 1)), ProgressBar(None)).engine_alone()
    assert started == ["1", "2"]
    assert len(reference.noise.differing) == len(reference.prompts)
    reference = await Certification(options(tmp_path / "like", tp=(2, 2)), ProgressBar(None)).engine_alone()
    assert started[2:] == ["2"]
    assert reference.noise.differing == ()


def test_an_active_port_is_rdma(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN")
    assert not run_module.has_rdma(tmp_path)
    (port / "state").write_text("4: ACTIVE")
    assert run_module.has_rdma(tmp_path)
