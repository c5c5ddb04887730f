"""A model whose scores are not numbers: the requests that it concerns fail, and everything else goes on."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import NOT_NUMBERS
from kvrelay.executors.torch import build_executor

ENGINE = EngineConfig(num_blocks=64, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=16)
SOUND, BROKEN = list(range(20, 52)), [*range(20, 40), 300, *range(41, 52)]
"""Two prompts; the second has token 300."""
EOS = 1
Change = Callable[[dict[str, torch.Tensor]], None]


def _broken_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"][700] = math.nan


def _broken_end(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"][EOS] = math.nan


def _infinite_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"][700, 3] = math.inf


def _broken_embedding(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][300, 5] = math.nan


def _infinite_embedding(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][300, 5] = math.inf


@pytest.fixture(scope="module")
def changed(
    checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Change | None], Path]:
    """The tiny checkpoint with other weights."""
    made: dict[Change | None, Path] = {}

    def make(change: Change | None) -> Path:
        if change not in made:
            path = made[change] = Path(shutil.copytree(checkpoint_of("llama"), tmp_path_factory.mktemp("m") / "model"))
            weights = load_file(path / "model.safetensors")
            if change is not None:
                change(weights)
            save_file(weights, path / "model.safetensors")
        return made[change]

    return make


@contextmanager
def _core(model: Path, block_size: int = 16, **runner: Any) -> Iterator[EngineCore]:
    settings = {"attention_backend": "torch", "num_threads": 1} | runner
    engine = replace(ENGINE, block_size=block_size)
    executor = build_executor(model, RunnerConfig(device="cpu", dtype="float32", **settings), engine)
    try:
        yield EngineCore(executor, engine, ManualClock(), worker_id="w")
    finally:
        executor.shutdown()


def _run(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[TokenOutput]]:
    """All of them in one batch."""
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in requests}
    for name, (prompt, sampling) in requests.items():
        core.add_request(Request(name, prompt, sampling))
    while core.has_work():
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    core.check_integrity()
    assert core.pool.num_free == core.pool.num_blocks
    return outputs


def _tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _told(outputs: list[TokenOutput]) -> list[tuple[object, ...]]:
    return [(output.token_ids, output.finish_reason, output.error) for output in outputs]


def _logprobs(outputs: list[TokenOutput]) -> list[float]:
    """Their last bits depend on the batch where products of matrices do."""
    positions = [each for output in outputs for each in (*(output.logprobs or ()), *(output.prompt_logprobs or ()))]
    return [each.logprob for position in positions if position is not None for each in (position.chosen, *position.top)]


def _sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "seed": 3} | values)


WAYS = {
    "greedy": _sampling(),
    "drawn": _sampling(temperature=1.0),
    "cold": _sampling(temperature=1e-5),
    "few": _sampling(temperature=1.0, top_k=5),
    "many": _sampling(temperature=1.0, top_k=200, top_p=0.9),
    "likely": _sampling(temperature=1.0, min_p=0.1),
    "logprobs": _sampling(logprobs=3),
    "penalties": _sampling(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={5: 100.0}),
    "grammar": _sampling(ignore_eos=False, grammar=Grammar(GrammarKind.REGEX, "[a-z ]{20}")),
    "scored": _sampling(max_tokens=0, prompt_logprobs=2),
    "both": _sampling(prompt_logprobs=0),
}


def _is_failed(outputs: list[TokenOutput]) -> bool:
    last = outputs[-1]
    if last.finish_reason is not FinishReason.ERROR:
        return False
    assert (last.error, last.is_final, last.status) == (NOT_NUMBERS, True, 500)
    return True


def _assert_finite(outputs: list[TokenOutput]) -> None:
    for output in outputs:
        for position in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
            if position is not None:
                assert all(math.isfinite(each.logprob) for each in (position.chosen, *position.top))


BYSTANDERS = {f"sound {name}": (SOUND, sampling) for name, sampling in WAYS.items()}


@pytest.fixture(scope="module", params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(changed: Callable[[Change | None], Path], backend: str) -> dict[str, list[TokenOutput]]:
    """What becomes of the bystanders with sound weights."""
    with _core(changed(None), attention_backend=backend) as core:
        outputs = _run(core, BYSTANDERS)
    assert not any(map(_is_failed, outputs.values()))
    return outputs


@pytest.mark.parametrize("change", [_broken_head, _broken_embedding, _infinite_embedding])
def test_whatever_chooses_the_token_the_request_fails(
    changed: Callable[[Change | None], Path], expected: dict[str, list[TokenOutput]], change: Change, backend: str
) -> None:
    """And of the requests beside it only those that the damage concerns."""
    with _core(changed(change), attention_backend=backend) as core:
        outputs = _run(core, BYSTANDERS | {name: (BROKEN, sampling) for name, sampling in WAYS.items()})
        for name in WAYS:
            assert _is_failed(outputs[name]), name
            assert not _tokens(outputs[name])
        for name in BYSTANDERS:
            if change is _broken_head:
                assert _is_failed(outputs[name])
            else:
                assert _told(outputs[name]) == _told(expected[name]), name
                assert _logprobs(outputs[name]) == pytest.approx(_logprobs(expected[name]), abs=1e-4), name


def test_an_infinite_weight_ends_only_what_it_decides(changed: Callable[[Change | None], Path]) -> None:
    """Its token scores plus or minus infinity: the one leaves no choice, the other is never chosen."""
    requests = {f"{n}": ([*range(n, n + 20)], _sampling(logprobs=2, temperature=n % 2)) for n in range(20, 28)}
    with _core(changed(None)) as core:
        expected = _run(core, requests)
    with _core(changed(_infinite_head)) as core:
        outputs = _run(core, requests)
    failed = [name for name in requests if _is_failed(outputs[name])]
    assert failed
    for name in requests:
        tokens, right = _tokens(outputs[name]), _tokens(expected[name])
        if int(name) % 2 == 0:
            assert tokens == (right[: len(tokens)] if name in failed else right)
        _assert_finite(outputs[name])
    assert any(_tokens(outputs[name]) for name in requests)


def test_logprobs_are_numbers_where_the_end_is_forbidden(changed: Callable[[Change | None], Path]) -> None:
    """``min_tokens`` takes the broken score out of the choice, not out of the sum of all probabilities."""
    with _core(changed(_broken_end)) as core:
        plain = _run(core, {"a": (SOUND, _sampling(ignore_eos=False, min_tokens=6))})["a"]
        assert len(_tokens(plain)) == 6
        asked = {"a": (SOUND, _sampling(ignore_eos=False, min_tokens=6, logprobs=2))}
        assert _is_failed(_run(core, asked)["a"])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_what_free_blocks_hold_touches_no_answer(changed: Callable[[Change | None], Path], backend: str) -> None:
    """A request that failed may have left anything there. Rows of different lengths are padded to the longest."""
    prompts = {"short": SOUND[:3], "even": SOUND, "long": SOUND[:21]}
    requests = {name: (prompt, _sampling(max_tokens=20)) for name, prompt in prompts.items()}
    with _core(changed(None), attention_backend=backend) as core:
        expected = _run(core, requests)
        core.clear_cache()
        region = core.executor.kv_region
        memory = (ctypes.c_float * (region.num_bytes // 4)).from_address(region.address)
        np.frombuffer(memory, dtype=np.float32).fill(math.nan)
        assert _run(core, requests) == expected


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_no_later_request_begins_with_what_a_failed_one_has_left(
    changed: Callable[[Change | None], Path], backend: str
) -> None:
    """Its first block was computed in one step with the broken token behind it."""
    start = BROKEN[8:]
    sound = {"a": (start[:10] + SOUND[20:], _sampling())}
    with _core(changed(_broken_embedding), attention_backend=backend, block_size=4) as core:
        expected = _run(core, sound)
        core.clear_cache()
        assert _is_failed(_run(core, {"b": (start, _sampling())})["b"])
        outputs = _run(core, sound)
        assert _tokens(outputs["a"]) == _tokens(expected["a"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}])
def test_the_ranks_tell_of_it(changed: Callable[[Change | None], Path], ranks: dict[str, int]) -> None:
    with _core(changed(_broken_embedding), rank_timeout_s=60.0, **ranks) as core:
        requests = {"broken": (BROKEN, _sampling()), "scored": (BROKEN, WAYS["scored"]), "sound": (SOUND, _sampling())}
        outputs = _run(core, requests)
        assert _is_failed(outputs["broken"])
        assert _is_failed(outputs["scored"])
        assert len(_tokens(outputs["sound"])) == 6
