"""A tokenizer that cannot be loaded is told with the name of the file that is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvrelay.data.tokenizer_files import TOKENIZER_FILES
from kvrelay.errors import CheckpointError
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

DEEP = "[" * 100_000
UNKNOWN_TOKEN = (
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "post_processor": {"type": '
    '"TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", '
    '"type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], '
    '"special_tokens": {}}}'
)
BROKEN = [
    ("tokenizer.json", "{"),
    ("tokenizer.json", "{}"),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'),
    ("tokenizer.json", DEEP),
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", DEEP),
    ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ("tokenizer_config.json", '{"chat_template": 5}'),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "{{ x | nothing }}"}]}'),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 5}]}'),
    ("special_tokens_map.json", "["),
    ("added_tokens.json", "[]"),
    ("chat_template.json", '{"chat_template": "{% endfor %}"}'),
    ("chat_template.jinja", "{{ messages"),
    ("chat_template.jinja", "{{ " + "(" * 5_000 + ")" * 5_000 + " }}"),
    ("chat_template.jinja", "{% for a in b %}" * 30 + "{% endfor %}" * 30),
    ("generation_config.json", '{"temperature": "hot"}'),
]


SECOND_TEXT = (
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "post_processor": {"type": '
    '"Sequence", "processors": [{"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], '
    '"pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], '
    '"special_tokens": {}}]}}'
)


@pytest.mark.parametrize(
    ("text", "reason"), [(UNKNOWN_TOKEN, "the token <s>, its special_tokens do not"), (SECOND_TEXT, "a second one")]
)
def test_the_library_is_not_asked_for_what_it_panics_at(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    """It would print pages."""
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"tokenizer.json: .*{reason}"):
        load_tokenizer(path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_file_is_named_in_the_error(model_dir: Path, tmp_path: Path, name: str, text: str) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert str(path / name) in caught.value.message


OPTIONAL = [name for name in TOKENIZER_FILES if name != "tokenizer.json"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_file_that_is_there_and_is_none_is_refused(model_dir: Path, tmp_path: Path, name: str) -> None:
    """A link into a cache whose file is gone: without it the model would have another template, other ends."""
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert caught.value.message == f"{path / name} is no file, or a link to one that is gone: restore it, or remove it"


def test_an_id_that_no_vocabulary_has_takes_no_memory(model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    vocab = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}'
    (path / "tokenizer.json").write_text(vocab)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: it has a token with the id 4,000,000,000"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "-1"),
        ("temperature", "NaN"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("top_p", '"0.9"'),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", f"1{400 * '0'}"),
        ("min_p", "-0.1"),
        ("min_p", "Infinity"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "true"),
    ],
)
def test_a_default_that_no_request_could_use_is_refused(
    model_dir: Path, tmp_path: Path, field: str, value: str
) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (path / "generation_config.json").write_text(f'{{"{field}": {value}}}')
    with pytest.raises(CheckpointError, match=rf"generation_config\.json .*{field}.*; correct or remove it$"):
        load_tokenizer(path)


def test_defaults_that_switch_a_filter_off_are_taken(model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    (path / "generation_config.json").write_text(json.dumps(given))
    assert load_tokenizer(path).default_sampling.given == given
    (path / "generation_config.json").write_text(json.dumps(dict.fromkeys(given)))
    assert load_tokenizer(path).default_sampling.given == {}


def test_files_that_are_not_utf8_are_refused(model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(CheckpointError, match=name):
            load_tokenizer(path)


def test_the_first_file_with_a_template_counts(model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_dir, tmp_path / "model"))
    for name, text in (
        ("chat_template.json", json.dumps({"chat_template": "second"})),
        ("chat_template.jinja", "first"),
    ):
        (path / name).write_text(text)
        template = load_tokenizer(path).chat_template
        assert template is not None
        assert template.render([]) in text
