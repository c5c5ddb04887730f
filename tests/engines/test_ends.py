"""A model's end tokens end an answer on every engine, whichever file of the checkpoint names them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engines.openai.scripted import Script, scripted_server
from tests.engines.openai.test_host import Running
from tests.engines.vllm.scripted import ScriptedVllm, scripted_start

from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, UpstreamConfig, WorkerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.thread import EngineThread
from kvrelay.engines import vllm
from kvrelay.engines.registry import build_executor, build_host

ENGINE = EngineConfig(num_blocks=32, max_model_len=256, max_num_seqs=4)
RUNNER = RunnerConfig(device="cpu", dtype="float32", attention_backend="torch", num_threads=1)
VOCAB: dict[str, int] = json.loads((bundled_checkpoint_path() / "tokenizer.json").read_text())["model"]["vocab"]
KINDS = ("mock", "torch", "openai", "vllm")


def _checkpoint(directory: Path, *, config: Any = None, generation: Any = None, tokenizer: str | None = None) -> Path:
    """The bundled model with other end tokens."""
    for file in bundled_checkpoint_path().iterdir():
        (directory / file.name).unlink(missing_ok=True)
        (directory / file.name).symlink_to(file)
    changes = {
        "config.json": {"eos_token_id": config},
        "generation_config.json": {"eos_token_id": generation},
        "tokenizer_config.json": {"eos_token": tokenizer},
    }
    for name, change in changes.items():
        content = json.loads((directory / name).read_text()) | change
        (directory / name).unlink()
        (directory / name).write_text(json.dumps(content))
    return directory


@contextmanager
def _engine(kind: str, model: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        upstream = UpstreamConfig()
        if kind == "openai":
            url = stack.enter_context(scripted_server(Script(vocab_size=1024))).url
            upstream = UpstreamConfig(upstream=url, upstream_start_timeout_s=0.0)
        if kind == "vllm":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(vllm, "start_vllm", lambda arguments, *_: scripted_start(ScriptedVllm(), arguments))
        settings = WorkerConfig(
            model_path=model, engine=ENGINE, runner=RUNNER, mock=MockConfig(speedup_ratio=0), upstream=upstream
        )
        host: EngineHost | None = build_host(kind, settings, "worker")
        if host is None:
            host = EngineThread(EngineCore(build_executor(kind, settings), ENGINE, MonotonicClock(), worker_id="w"))
        running = Running(host)
        host.start(running.on_step, running.dead.append)
        try:
            yield running
        finally:
            assert host.close()


def _answer(kind: str, model: Path, **sampling: Any) -> tuple[list[int], FinishReason | None, int | None]:
    """Tokens, finish reason and the stop token that is told."""

    async def ask(engine: Running) -> tuple[list[int], FinishReason | None, int | None]:
        await engine.add("a", SamplingParams(max_tokens=6, temperature=0.0, **sampling))
        last = await engine.end("a")
        return engine.tokens("a"), last.finish_reason, last.stop_token

    with _engine(kind, model) as engine:
        return asyncio.run(ask(engine))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_source_ends_an_answer(kind: str, tmp_path: Path) -> None:
    tokens, reason, _ = _answer(kind, _checkpoint(tmp_path))
    assert (len(tokens), reason) == (6, FinishReason.LENGTH)
    third = next(index for index in (2, 3, 4) if tokens[index] not in tokens[:index])
    end, (piece,) = tokens[third], [piece for piece, token in VOCAB.items() if token == tokens[third]]
    other = next(token for token in range(500, 520) if token not in tokens)
    for sources in (
        {"config": end},
        {"config": [other, end], "generation": other},
        {"config": other, "generation": [end]},
        {"config": other, "generation": [other], "tokenizer": piece},
    ):
        model = _checkpoint(tmp_path, **sources)
        assert _answer(kind, model) == (tokens[: third + 1], FinishReason.STOP, None), sources
    assert _answer(kind, model, ignore_eos=True) == (tokens, FinishReason.LENGTH, None)
    assert _answer(kind, model, stop_token_ids=(end,)) == (tokens[: third + 1], FinishReason.STOP, end)
    if kind == "torch":  # the others' doubles mask nothing
        longer, _, _ = _answer(kind, model, min_tokens=third + 2)
        assert end not in longer[: third + 1]


def test_the_mock_engine_never_generates_one(tmp_path: Path) -> None:
    tokens, _, _ = _answer("mock", _checkpoint(tmp_path))
    pieces = {token: piece for piece, token in VOCAB.items()}
    model = _checkpoint(tmp_path, config=tokens[0], generation=[tokens[1]], tokenizer=pieces[tokens[2]])
    others, _, _ = _answer("mock", model)
    assert not set(others) & set(tokens[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_the_model_does_not_have_harms_no_request(kind: str, tmp_path: Path) -> None:
    """``min_tokens`` forbids the ends by their ids."""
    model = _checkpoint(tmp_path, config=[1, 1024, -1], generation=2**33)
    tokens, reason, _ = _answer(kind, model, min_tokens=3)
    assert (len(tokens), reason) == (6, FinishReason.LENGTH)
