"""Readers: what each format gives, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.bench.formats import FileFormat, detect_format, read_azure, read_conversations, read_mooncake
from kvrelay.errors import InvalidInputError


def lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def texts(path: Path, fmt: FileFormat = FileFormat.AUTO, *, first: bool = False) -> list[str]:
    return [conversation.text(first_turn_only=first) for conversation in read_conversations(path, fmt)]


SHARE = {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def test_sharegpt_as_array_and_as_lines(tmp_path: Path) -> None:
    array = tmp_path / "share.json"
    array.write_text(json.dumps([SHARE, {"conversations": []}]))
    assert texts(array) == texts(lines(tmp_path / "share.jsonl", SHARE)) == ["hi\nhello"]
    assert texts(array, first=True) == ["hi"]


def test_first_turn_keeps_the_system_prompt(tmp_path: Path) -> None:
    roles = [("system", "Be kind."), ("user", "hi"), ("assistant", "hello"), ("user", "bye")]
    path = lines(tmp_path / "m.jsonl", {"messages": [{"role": role, "content": text} for role, text in roles]})
    assert texts(path, first=True) == ["Be kind.\nhi"]


def test_message_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    assert texts(lines(tmp_path / "m.jsonl", {"messages": [{"role": "user", "content": parts}]})) == ["ab"]


def test_a_dolly_file_becomes_prompts(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"instruction": "I", "context": "C", "response": "R", "category": "qa"})
    assert detect_format(path) is FileFormat.DOLLY
    assert texts(path) == ["I\nC\nR"]


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\r\n\ntwo\n")
    assert texts(path) == ["one", "two"]


def test_lmsys_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "lmsys.parquet"
    turns = [{"content": "hi", "role": "user"}, {"content": "hello", "role": "assistant"}]
    parquet.write_table(pyarrow.table({"conversation_id": ["a", "b"], "conversation": [turns, turns[:1]]}), path)
    assert texts(path) == ["hi\nhello", "hi"]
    parquet.write_table(pyarrow.table({"other": [1]}), path)
    with pytest.raises(InvalidInputError):
        texts(path)
    path.write_bytes(b"PAR1 this is none")
    with pytest.raises(InvalidInputError, match="not a parquet file"):
        texts(path)


def test_mooncake_and_azure(tmp_path: Path) -> None:
    trace = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [4, 5]}
    (record,) = read_mooncake(lines(tmp_path / "m.jsonl", trace))
    assert (record.timestamp_s, record.input_len, record.hash_ids) == (1.5, 600, (4, 5))
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,9,1\n"
    )
    assert [(r.timestamp_s, r.input_len, r.output_len) for r in read_azure(path)] == [(0, 374, 44), (1.5, 9, 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[{]", "not a ShareGPT file"),
        ("a.jsonl", b'{"messages": 3}', "a.jsonl:1: "),
        ("a.jsonl", b'{"messages": []}\n{"mess', "a.jsonl:2: "),
        ("a.jsonl", b'{"nothing": 1}', "no known format"),
        ("a.txt", b"", "is empty"),
        ("a.txt", b"ok\n\xff\xfe", "a.txt:2: not UTF-8"),
        ("a.json", b"[]", "is empty"),
        ("a.jsonl", b'{"hash_ids": [1]}', "holds no text"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        texts(path)


def test_missing_file_and_bad_csv(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot read"):
        texts(tmp_path / "none.txt")
    with pytest.raises(InvalidInputError, match="cannot read"):
        texts(tmp_path)
    path = tmp_path / "azure.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInputError, match=r"azure\.csv:2: not a row"):
        list(read_azure(path))
