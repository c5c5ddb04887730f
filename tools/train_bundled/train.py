"""Trains the bundled checkpoint: ``python -m train_bundled.train --out DIR --minutes 52`` (from ``tools/``).

Owns the schedule (context lengths, learning rates, when to save). The text comes from ``text``, the model from
``model``. It may be stopped at any time: the latest checkpoint is always complete on disk. The learning rate follows
the clock, so a slow machine sees fewer tokens, not an unfinished schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kvrelay.executors.torch.checkpoints.tokenizer import BOS_ID, EOS_ID, train_tokenizer, write_tokenizer
from train_bundled.model import Shape, TrainedLlama, hf_config
from train_bundled.text import ANSWER, TextMaker, tokenizer_corpus
from train_bundled.wiring import wire


@dataclass(frozen=True)
class Settings:
    """What a run is made of. ``lengths``: (share of the time at which it begins, tokens per row)."""

    minutes: float
    seed: int
    optimizer: str
    learning_rate: float
    tokens_per_step: int
    lengths: tuple[tuple[float, int], ...]
    report_every: int


def length_at(settings: Settings, progress: float) -> int:
    """Tokens per row at ``progress`` (0 to 1)."""
    return [length for begin, length in settings.lengths if progress >= begin][-1]


def rate_at(progress: float, step: int) -> float:
    """Factor of the learning rate: 100 steps of warm-up, flat, then linear to 2 % over the last 40 % of the time."""
    warm = min(1.0, (step + 1) / 100)
    return warm * max(0.02, min(1.0, (1.0 - progress) / 0.4))


def make_optimizers(model: TrainedLlama, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon or AdamW for the matrices, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate = settings.learning_rate
    adamw = torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98), fused=True)
    if settings.optimizer == "adamw":
        adamw.add_param_group({"params": matrices, "weight_decay": 0.05})
        return [adamw]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4), adamw]


def losses(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted mean loss, mean loss of answers, share of answer tokens that greedy decoding gets right)."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    flat = weights.flatten()
    asked = flat == ANSWER
    with torch.no_grad():
        right = (logits.flatten(0, 1)[asked].argmax(-1) == targets.flatten()[asked]).float().mean()
    return (each * flat).sum() / flat.sum(), each[asked].mean().detach(), right


def save(model: TrainedLlama, shape: Shape, directory: Path) -> None:
    """Write weights (bf16) and configuration; the weights appear under their name only when complete."""
    tensors = {name: t.detach().bfloat16().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors.part", metadata={"format": "pt"})
    (directory / "model.safetensors.part").chmod(0o644)
    os.replace(directory / "model.safetensors.part", directory / "model.safetensors")
    config = hf_config(shape)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def train(settings: Settings, shape: Shape, directory: Path, compiled: bool) -> None:
    """Run the whole schedule, printing a line and saving every ``report_every`` steps."""
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(tokenizer_corpus(settings.seed), shape.vocab)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, directory, shape.max_position)
    maker = TextMaker(tokenizer, settings.seed)
    model = TrainedLlama(shape)
    wire(model)
    forward = torch.compile(model, dynamic=False) if compiled else model
    optimizers = make_optimizers(model, settings)
    begun, step, seen = time.monotonic(), 0, 0
    while (progress := (time.monotonic() - begun) / (60 * settings.minutes)) < 1.0:
        length = length_at(settings, progress)
        ids, weights = (torch.from_numpy(a) for a in maker.batch(settings.tokens_per_step // length, length))
        loss, answer_loss, right = losses(forward(ids[:, :-1]), ids[:, 1:], weights[:, 1:])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate_at(progress, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += settings.tokens_per_step
        if step % settings.report_every == 0:
            passed = time.monotonic() - begun
            print(
                f"step {step} time {passed:.0f} s length {length} tokens {seen / 1e6:.2f} M ({seen / passed:.0f}/s) "
                f"loss {loss.item():.4f} answers {answer_loss.item():.4f} right {right.item():.3f}",
                flush=True,
            )
            save(model, shape, directory)
    save(model, shape, directory)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the bundled checkpoint.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=52.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--lengths", default="0:128,0.04:256,0.12:512,0.5:1024", help="share of the time:tokens, ...")
    parser.add_argument("--report-every", type=int, default=100, help="steps between reports and saves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="faster, needs a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = tuple((float(a), int(b)) for a, b in (pair.split(":") for pair in args.lengths.split(",")))
    settings = Settings(
        minutes=args.minutes,
        seed=args.seed,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        tokens_per_step=args.tokens_per_step,
        lengths=lengths,
        report_every=args.report_every,
    )
    train(settings, Shape(), args.out, args.compile)


if __name__ == "__main__":
    main()
