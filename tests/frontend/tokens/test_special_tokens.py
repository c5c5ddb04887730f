"""Special tokens and chat templates from all the files that may hold them, against transformers' AutoTokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.frontend.doubles import byte_level_tokenizer
from tests.lazily import transformers
from tokenizers import processors

from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.generate.prompts import completion_prompts
from kvrelay.frontend.side_threads import complete
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
TEMPLATE = "|".join(f"{{{{ {name} }}}}" for name in NAMES)
TEXT = "<|begin|>The <|new|> fox <s> a<odd>  b</s>quick<|end|><|image|>"


def token(content: str, **flags: bool) -> dict[str, object]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


CASES: dict[str, dict[str, object]] = {
    "only a map": {"special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": token("<|end|>")}},
    "a map beside a config": {
        "tokenizer_config.json": {**CLASS, "bos_token": "<|end|>", "pad_token": "<|end|>"},
        "special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": "</s>"},
    },
    "a map that the config overrules": {
        "tokenizer_config.json": {**CLASS, "bos_token": "<|begin|>", "added_tokens_decoder": {"0": token("<|end|>")}},
        "special_tokens_map.json": {"bos_token": "<|end|>", "eos_token": "</s>"},
    },
    "named tokens that are not added ones": {
        "tokenizer_config.json": {**CLASS, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "The"}
    },
    "tokens of the config only": {
        "tokenizer_config.json": {
            **CLASS,
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "401": token("</s>"),
                "400": token("<|new|>"),
                "402": token("<odd>", special=False, lstrip=True, rstrip=True),
            },
        }
    },
    "a token that is special in the config": {
        "tokenizer_config.json": {
            **CLASS,
            "added_tokens_decoder": {"2": token("!"), "0": token("<|end|>", lstrip=True)},
        }
    },
    "more special tokens": {
        "tokenizer_config.json": {
            **CLASS,
            "additional_special_tokens": ["<|new|>", {"__type": "AddedToken", **token("<odd>", rstrip=True)}],
        }
    },
    "more special tokens in a map": {
        "special_tokens_map.json": {"additional_special_tokens": ["<|new|>"], "eos_token": token("</s>", lstrip=True)}
    },
    "tokens with names of their own": {
        "tokenizer_config.json": {**CLASS, "image_token": "<|image|>", "extra_special_tokens": {"odd_token": "<odd>"}}
    },
    "a list of extra tokens": {"tokenizer_config.json": {**CLASS, "extra_special_tokens": ["<|image|>", "<odd>"]}},
    "an old file of added tokens": {
        "tokenizer_config.json": {**CLASS, "eos_token": "</s>"},
        "added_tokens.json": {"<|new|>": 400, "</s>": 401},
    },
    "a flag that transformers ignores": {
        "tokenizer_config.json": {**CLASS, "bos_token": "<|begin|>", "add_bos_token": False, "add_eos_token": True}
    },
    "special tokens that are split": {
        "tokenizer_config.json": {**CLASS, "bos_token": "<|begin|>", "split_special_tokens": True}
    },
}


def write(path: Path, files: Mapping[str, object]) -> Path:
    """A checkpoint whose tokenizer puts <|begin|> before a text; texts are written as they are, others as JSON."""
    rust = byte_level_tokenizer()
    rust.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    rust.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": CLASS, **files}.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())
    return path


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    path = write(tmp_path, {**CASES[case], "chat_template.jinja": TEMPLATE})
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    ids = ours.encode(TEXT, add_special_tokens=False)
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    chat = [{"role": "user", "content": "a"}]
    assert ours.chat_template is not None
    assert ours.chat_template.render(chat) == theirs.apply_chat_template(chat, tokenize=False)


PLAIN, FOR_TOOLS = "plain {{ messages[0].content }}", "tools {{ tools | length }}"
TEMPLATES: dict[str, dict[str, object]] = {
    "one in the config": {"tokenizer_config.json": {**CLASS, "chat_template": PLAIN}},
    "named ones in the config": {
        "tokenizer_config.json": {
            **CLASS,
            "chat_template": [
                {"name": "rag", "template": "{% nonsense %}"},
                {"name": "tool_use", "template": FOR_TOOLS},
                {"name": "default", "template": PLAIN},
            ],
        }
    },
    "a file before the config": {
        "chat_template.jinja": PLAIN,
        "tokenizer_config.json": {**CLASS, "chat_template": [{"name": "tool_use", "template": FOR_TOOLS}]},
    },
    "named files": {
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/tool_use.jinja": FOR_TOOLS,
        "additional_chat_templates/rag.jinja": "{% nonsense %}",
        "tokenizer_config.json": {**CLASS, "chat_template": "config"},
    },
    "an empty file": {"chat_template.jinja": "", "tokenizer_config.json": {**CLASS, "chat_template": PLAIN}},
    "Windows line ends": {"chat_template.jinja": "{% if true %}\r\na\r\n{% endif %}\r\nb\r\n\r\n"},
    "a byte order mark": {"chat_template.jinja": "\ufeff" + PLAIN},
}


@pytest.mark.parametrize("case", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_the_template_is_the_one_that_transformers_takes(tmp_path: Path, case: str, tools: Any) -> None:
    path = write(tmp_path, TEMPLATES[case])
    ours, theirs = load_tokenizer(path).chat_template, transformers.AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "a"}]
    assert ours is not None
    rendered = ours.chosen(tools is not None).render(chat, tools=tools)
    assert rendered == theirs.apply_chat_template(chat, tools=tools, tokenize=False)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": token("a")}},
        {"added_tokens_decoder": {"1": 5}},
        {"extra_special_tokens": 5},
        {"additional_special_tokens": [5]},
        {"bos_token": {"content": "a", "lstrip": "yes"}},
    ],
)
def test_malformed_tokens_are_refused_in_one_line(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.* malformed") as caught:
        load_tokenizer(write(tmp_path, {"tokenizer_config.json": config}))
    assert "\n" not in caught.value.message


def test_a_token_beyond_the_model_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, {"tokenizer_config.json": {**CLASS, "bos_token": "<s>"}}))
    size = tokenizer.vocab_size - 1
    small = cast(Model, SimpleNamespace(name="m", tokenizer=tokenizer, max_model_len=2**10, vocab_size=size))
    assert len(complete(completion_prompts(["fox"], small, add_special_tokens=False))) == 1
    with pytest.raises(InvalidInputError, match=f"the token '<s>'.* only {size} tokens"):
        complete(completion_prompts(["fox <s>"], small, add_special_tokens=False))
