"""The bundled checkpoint: small, complete, writes English, recalls what it was told, shows damage to its KV."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

import pytest
import torch
from tests.lazily import transformers

from kvrelay.data import bundled_checkpoint_path
from kvrelay.data.prose import sentence, story
from kvrelay.data.recall import RecallPrompt, cue, fact, recall_chat, recall_prompt

NUM_PROMPTS = 40


@pytest.fixture(scope="module")
def model() -> Iterator[transformers.PreTrainedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_checkpoint_path(), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.inference_mode():
        yield loaded.eval()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(bundled_checkpoint_path())


def greedy(model: transformers.PreTrainedModel, ids: list[int], num_tokens: int) -> list[int]:
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def prompts(make: str) -> Iterator[RecallPrompt]:
    """Prompts of about 20 to 520 tokens that ask for any of their facts."""
    rng = Random(f"test {make}")
    for _ in range(NUM_PROMPTS):
        draw = recall_prompt if make == "completion" else recall_chat
        yield draw(rng, num_pairs=rng.randint(1, 30), num_fillers=rng.randint(0, 25))


def test_files_are_complete_and_small() -> None:
    files = {file.name: file.stat().st_size for file in bundled_checkpoint_path().iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(files.values()) <= 6_000_000


def test_it_can_be_split_for_two_ranks(model: transformers.PreTrainedModel) -> None:
    assert model.config.num_key_value_heads % 2 == 0
    assert model.config.num_hidden_layers % 2 == 0
    assert model.config.max_position_embeddings >= 8192


def test_completions_recall(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    right = 0
    for asked in prompts("completion"):
        answer = greedy(model, tokenizer(asked.prompt).input_ids, 2)
        right += tokenizer.decode(answer) == asked.answer
    assert right > 0.9 * NUM_PROMPTS


def test_chats_recall_and_end(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    right = 0
    for asked in prompts("chat"):
        chat = [{"role": "user", "content": asked.prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = greedy(model, tokenizer(text, add_special_tokens=False).input_ids, 12)
        right += tokenizer.decode(answer) == f"{cue(asked.name)}{asked.answer}.</s>"
    assert right > 0.9 * NUM_PROMPTS


def test_damaged_kv_shows_as_a_wrong_answer(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Zeroing one block of 16 tokens of the cache, where the fact lies, changes nearly every answer."""
    wrong = 0
    for seed in range(NUM_PROMPTS):
        asked = recall_prompt(Random(seed), num_pairs=8, num_fillers=6)
        ids = tokenizer(asked.prompt, return_tensors="pt").input_ids
        bound = fact(asked.name, asked.answer.strip())
        end = len(tokenizer(asked.prompt[: asked.prompt.index(bound) + len(bound)]).input_ids)
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys[:, :, max(0, end - 16) : end] = 0.0
            layer.values[:, :, max(0, end - 16) : end] = 0.0
        first = model(ids[:, -1:], past_key_values=cache).logits[0, -1].argmax()
        wrong += tokenizer.decode(first) != f" {asked.answer.split()[0]}"
    assert wrong > 0.8 * NUM_PROMPTS


@pytest.mark.parametrize("beginning", ["Once there was a", "The", "It is a cold", "Tom is a"])
def test_greedy_output_is_made_of_the_grammar_s_words(
    beginning: str, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    rng = Random(0)
    texts = [f"{story(rng)} {sentence(rng)} {recall_prompt(rng, 5).prompt}" for _ in range(1000)]
    known = set(re.findall(r"\w+", " ".join(texts)))
    out = tokenizer.decode(greedy(model, tokenizer(beginning).input_ids, 50), skip_special_tokens=True)
    words = re.findall(r"\w+", beginning + out)[:-1]
    assert len(words) > 6
    assert set(words) <= known
