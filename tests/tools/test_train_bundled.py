"""The training tool: its encoder is the tokenizer, its rows ask for what they stated, its model is the one served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.lazily import transformers
from tokenizers import Tokenizer

from kvrelay.data import bundled_checkpoint_path
from kvrelay.data.recall import VALUE_WORDS, recall_prompt

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def _tools_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(TOOLS))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_checkpoint_path() / "tokenizer.json"))


def test_encoder_is_the_tokenizer(tokenizer: Tokenizer) -> None:
    from train_bundled.text import Encoder, tokenizer_corpus

    encoder = Encoder(tokenizer)
    for text in (*tokenizer_corpus(num_texts=100), "<s><|user|>Hi,  you!\n\nIt's 12.</s>", " <x> 007"):
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_bundled_tokenizer_is_what_the_script_makes(tokenizer: Tokenizer) -> None:
    from train_bundled.text import tokenizer_corpus

    from kvrelay.executors.torch.checkpoints.tokenizer import train_tokenizer

    assert train_tokenizer(tokenizer_corpus(), 1024).to_str() == tokenizer.to_str()


def test_rows_are_full_seeded_and_ask_for_what_they_stated(tokenizer: Tokenizer) -> None:
    from train_bundled.text import ANSWER, NOISE, TextMaker

    ids, weights = TextMaker(tokenizer, seed=3).batch(num_rows=40, length=256)
    again, _ = TextMaker(tokenizer, seed=3).batch(num_rows=40, length=256)
    assert ids.shape == weights.shape == (40, 257)
    assert np.array_equal(ids, again)
    words = {tokenizer.encode(f" {word}", add_special_tokens=False).ids[0] for word in VALUE_WORDS}
    num_answers = 0
    for row, row_weights in zip(ids, weights, strict=True):
        stated = {tuple(pair) for pair in _pairs(row, row_weights, np.float32(NOISE)) if pair[0] in words}
        for pair in _pairs(row, row_weights, np.float32(ANSWER)):
            if pair[0] in words:
                num_answers += 1
                assert tuple(pair) in stated
    assert num_answers > 100


def _pairs(row: np.ndarray, weights: np.ndarray, weight: np.float32) -> list[list[int]]:
    places = np.flatnonzero((weights[:-1] == weight) & (weights[1:] == weight))
    return [row[place : place + 2].tolist() for place in places]


def test_the_trained_model_is_the_served_one(tokenizer: Tokenizer) -> None:
    from train_bundled.model import Shape, TrainedLlama

    trained = TrainedLlama(Shape())
    state = load_file(bundled_checkpoint_path() / "model.safetensors")
    trained.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    served = transformers.AutoModelForCausalLM.from_pretrained(bundled_checkpoint_path(), dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(recall_prompt(Random(0), 10, 10).prompt).ids])
    with torch.inference_mode():
        ours, theirs = trained(ids).float(), served(ids).logits
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(("head", "back"), [(0, 1), (1, 2)])
def test_wiring_looks_back(head: int, back: int) -> None:
    from train_bundled.model import Shape, TrainedLlama
    from train_bundled.wiring import wire

    torch.manual_seed(0)
    model = TrainedLlama(Shape())
    wire(model)
    layer = model.model.decoder_layers()[0]
    block = slice(head * 64, (head + 1) * 64)
    with torch.inference_mode():
        output = layer.self_attn.o_proj.weight[:, block].clone()
        layer.self_attn.o_proj.weight.zero_()
        layer.self_attn.o_proj.weight[:, block] = output
        written: list[torch.Tensor] = []
        layer.self_attn.register_forward_hook(lambda _module, _inputs, out: written.append(out))
        ids = torch.randint(300, 1000, (1, 40))
        model(ids)
        stream = layer.input_layernorm(model.model.embed_tokens(ids))
        looked = written[0][0].float() @ torch.linalg.pinv(output).T
        values = stream[0] @ layer.self_attn.v_proj.weight[:64].T
    alike = torch.cosine_similarity(looked[back:], values[:-back], dim=-1)
    assert (alike > 0.9).float().mean() > 0.75  # not everywhere: the norms of embeddings differ a little
