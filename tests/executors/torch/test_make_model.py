"""Random checkpoints: loadable by transformers, of the sizes promised, reproducible, refused when impossible."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.lazily import transformers
from tokenizers import Tokenizer

from kvrelay.errors import InvalidInputError
from kvrelay.executors.torch.checkpoints import ARCHITECTURES, SIZES, make_model
from kvrelay.executors.torch.checkpoints.architectures import config_of, size_of, tensors_of
from kvrelay.executors.torch.checkpoints.tokenizer import Pieces, train_tokenizer

TEXTS = ("The fox 4711 'tis  x\n\n y", "naïve 😀 don't", "A 12 </s> <|user|>", "e\u0301 日本", "")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_every_tensor(arch: str, tmp_path: Path) -> None:
    make_model(tmp_path, arch, "tiny", seed=1, dtype="float32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == config_of(arch, "tiny", "float32")["architectures"][0]  # type: ignore[index]
    assert not any(info.values()), info
    tied = size_of(arch, "tiny").tied
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    with torch.inference_mode():
        logits = model(torch.tensor([[0, 300, 400, 500]])).logits
    assert logits.shape == (1, 4, 1024)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # one of each kind of pieces
def test_tokenizer_is_the_same_through_transformers(arch: str, tmp_path: Path) -> None:
    make_model(tmp_path, arch, "tiny")
    through = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(through) == plain.get_vocab_size() == size_of(arch, "tiny").vocab
    for text in TEXTS:
        assert through(text).input_ids == plain.encode(text).ids
    assert (through.bos_token_id, through.eos_token_id) == (0, 1)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi. "}]
    shown = through.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<s><|system|>Be kind.</s><|user|>Hi.</s><|assistant|>"


def test_sizes_of_the_issue() -> None:
    tiny = size_of("llama", "tiny")
    assert (tiny.num_layers, tiny.hidden, tiny.num_heads, tiny.num_kv_heads) == (4, 256, 8, 4)
    assert (tiny.head_dim, tiny.intermediate, tiny.vocab) == (32, 688, 1024)
    big = size_of("qwen2", "400m")
    assert (big.num_layers, big.hidden, big.intermediate) == (24, 896, 4864)
    assert (big.num_heads, big.num_kv_heads, big.vocab) == (14, 2, 32_000)
    num_parameters = sum(torch.Size(spec.shape).numel() for spec in tensors_of("qwen2", "400m"))
    assert 350e6 < num_parameters < 450e6


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_can_be_split_for_two_ranks(arch: str, size: str) -> None:
    sizes = size_of(arch, size)
    assert sizes.num_kv_heads % 2 == 0
    assert sizes.num_heads % sizes.num_kv_heads == 0
    assert sizes.max_position >= 8192


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_model(tmp_path / name, "qwen2", "tiny", seed=seed)
    first, second, other = (digest(tmp_path / name) for name in "abc")
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("shards", [2, 5, 39])
def test_shards_hold_the_same_tensors(shards: int, tmp_path: Path) -> None:
    make_model(tmp_path / "one", "llama", "tiny")
    make_model(tmp_path / "many", "llama", "tiny", shards=shards)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) == shards
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as whole:
        assert sorted(whole.keys()) == sorted(index["weight_map"])
        total_bytes = 0
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "many" / file, "pt") as part:
                assert torch.equal(part.get_tensor(name), whole.get_tensor(name))
                total_bytes += part.get_tensor(name).nbytes
    assert total_bytes == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    ("vocab_size", "pieces"),
    [
        *((vocab_size, pieces) for vocab_size in (261, 1024) for pieces in Pieces),
        (32_000, Pieces.GPT2),
        pytest.param(32_000, Pieces.QWEN, marks=pytest.mark.matrix),
    ],
)
def test_every_token_decodes_to_something(vocab_size: int, pieces: Pieces) -> None:
    tokenizer = train_tokenizer(["The old fox and the young fox."], vocab_size, pieces)
    assert tokenizer.get_vocab_size() == vocab_size
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(vocab_size))
    assert sum("\ufffd" in tokenizer.decode([i]) for i in range(vocab_size)) == 128
    for text in ("The fox, naïve 😀\t日本\n", "</p> 12"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_force_replaces_a_checkpoint_and_its_shards(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", "tiny", shards=3)
    make_model(tmp_path, "qwen3", "tiny", force=True)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"arch": "gpt2"}, "arch"),
        ({"size": "70b"}, "size"),
        ({"dtype": "int4"}, "dtype"),
        ({"seed": -1}, "seed"),
        ({"shards": 0}, "shards"),
        ({"shards": 40}, "shards"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    arguments: dict[str, str | int], param: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make_model(tmp_path / "new", **({"arch": "llama", "size": "tiny"} | arguments))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("most", [10_000, 200_000])
def test_a_full_disk_is_one_line(tmp_path: Path, most: int) -> None:
    """While the tokenizer is written, and the weights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            make_model(tmp_path / "model", "llama", "tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_bad_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
        with pytest.raises(InvalidInputError) as caught:
            make_model(path, "llama", "tiny")
        assert caught.value.param == "path"
    assert (tmp_path / "notes.txt").read_text() == "mine"
