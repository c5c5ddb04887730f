"""Measures a bundled checkpoint with transformers in float32: ``python -m train_bundled.evaluate DIR``.

Owns the recall figures of ``docs/bundled-checkpoint.md``: the share of answers that greedy decoding gets right in full
(both tokens), by the distance in tokens from the end of the fact to the place of the answer. Also prints samples.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvrelay.data.recall import RecallPrompt, cue, recall_chat, recall_prompt

BUCKETS = (50, 100, 200, 300, 400, 500, 600, 750, 1000)
SAMPLES = ("The", "Once there was a", "Every morning", "Tom and Ann", "It is a cold", "Hello, my name is")
CHATS = ("Hello!", "Who are you?", "Tell me a story about Ruth.", "What does a baker do?")


def chat_text(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """The text of a chat with one user message, up to where the assistant begins."""
    chat = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def is_right(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding after ``prompt`` gives exactly ``answer``; one forward pass."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return bool(logits.argmax(-1).tolist() == answer)


def draw(rng: Random, kind: str) -> RecallPrompt:
    """A prompt of up to about 800 tokens."""
    num_pairs = rng.randint(1, 40)
    num_fillers = rng.randint(0, 50)
    make = recall_prompt if kind == "completion" else recall_chat
    return make(rng, num_pairs, num_fillers)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plain: Tokenizer, kind: str, num: int
) -> dict[int, list[bool]]:
    """Right or wrong per prompt, by distance bucket (its upper end)."""
    rng = Random(f"evaluate {kind}")
    outcome: dict[int, list[bool]] = defaultdict(list)
    for _ in range(num):
        drawn = draw(rng, kind)
        bound = f"{cue(drawn.name)}{drawn.answer}"
        before = drawn.prompt[: drawn.prompt.index(bound) + len(bound)]
        text = f"<s>{drawn.prompt}"
        if kind == "chat":
            text = chat_text(tokenizer, drawn.prompt) + cue(drawn.name)
        ids = plain.encode(text, add_special_tokens=False).ids
        answer = plain.encode(drawn.answer, add_special_tokens=False).ids
        distance = len(ids) - len(plain.encode(before).ids)
        bucket = next((end for end in BUCKETS if distance <= end), BUCKETS[-1])
        outcome[bucket].append(is_right(model, ids, answer))
    return outcome


def continued(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int) -> str:
    """The greedy continuation of ``text``, which holds its own ``<s>``."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure a bundled checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--num", type=int, default=400, help="prompts per kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.directory)
    plain = Tokenizer.from_file(str(args.directory / "tokenizer.json"))
    with torch.inference_mode():
        for kind in ("completion", "chat"):
            outcome = measure(model, tokenizer, plain, kind, args.num)
            for end in sorted(outcome):
                right = outcome[end]
                print(f"{kind}: up to {end} tokens: {sum(right)}/{len(right)} = {sum(right) / len(right):.3f}")
        for sample in SAMPLES:
            print(f"[{sample}]{continued(model, tokenizer, f'<s>{sample}', 60)}")
        for content in CHATS:
            print(f"[{content}] {continued(model, tokenizer, chat_text(tokenizer, content), 80)}")


if __name__ == "__main__":
    main()
