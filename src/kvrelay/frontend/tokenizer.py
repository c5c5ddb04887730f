"""The checkpoint's tokenizer: text to tokens and back, without the transformers package (its import costs seconds).

It reads ``tokenizer.json`` (the whole algorithm), ``tokenizer_config.json`` (special tokens, chat template),
``chat_template.jinja`` or ``.json`` and ``generation_config.json`` (the model's recommended sampling). It does not know
requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.frontend.chat_template import ChatTemplate
from kvrelay.frontend.detokenizer import ByteLevelDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer


class DefaultSampling(msgspec.Struct, frozen=True):
    """What ``generation_config.json`` recommends where a request is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What the files beside ``tokenizer.json`` say; files that are missing say nothing."""

    chat_template: ChatTemplate | None = None
    default_sampling: DefaultSampling = field(default_factory=DefaultSampling)


class Tokenizer:
    """Thread-safe for ``encode`` and ``decode``."""

    def __init__(self, rust: RustTokenizer, settings: TokenizerSettings) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._special = _special_ids(rust)
        self._byte_level = _is_byte_level(rust)
        self._tokens: dict[bool, TokenBytes] = {}
        self.vocab_size = int(rust.get_vocab_size(with_added_tokens=True))
        self.default_sampling = settings.default_sampling
        self.chat_template = settings.chat_template

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, byte_level={self._byte_level})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidInputError for text that is no valid Unicode (lone surrogates)."""
        try:
            ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as exc:
            raise InvalidInputError("the text is not valid Unicode", param="prompt") from exc
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text by itself, special or not; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        if self._byte_level:
            pieces = self._token_bytes(False).pieces
            return pieces[token_id] if token_id < len(pieces) else b""
        return self.decode([token_id]).encode()

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self._rust.id_to_token(token_id) or "")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one, for one sequence."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._token_bytes(skip_special_tokens))
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def _token_bytes(self, skip_special: bool) -> TokenBytes:
        if skip_special not in self._tokens:
            pieces = [_byte_level_piece(self.token_string(token)) for token in range(self.vocab_size)]
            self._tokens[skip_special] = TokenBytes(pieces, self._special if skip_special else frozenset())
        return self._tokens[skip_special]


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{model_path} has no tokenizer.json")
    try:
        rust = RustTokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # the binding raises bare Exception, and for a panic a BaseException of its own
        raise CheckpointError(f"cannot load {file}: {exc}") from exc
    return Tokenizer(rust, _read_settings(model_path))


def _read_settings(path: Path) -> TokenizerSettings:
    config = _read_json(path / "tokenizer_config.json")
    try:
        defaults = msgspec.convert(_read_json(path / "generation_config.json"), DefaultSampling)
    except msgspec.ValidationError as exc:
        raise CheckpointError(f"{path / 'generation_config.json'} is malformed: {exc}") from exc
    return TokenizerSettings(_chat_template(path, config), defaults)


def _chat_template(path: Path, config: dict[str, object]) -> ChatTemplate | None:
    """The template for plain chats, from the first of three files that has one."""
    file = path / "chat_template.jinja"
    template: object = _read_text(file) if file.is_file() else None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if template is None:
            file = path / name
            template = _read_json(file).get("chat_template")
    if isinstance(template, list):
        # Several named templates; "default" is the one for plain chats.
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(f"{file}: the chat template is no text")
    try:
        return ChatTemplate(template, _special_tokens(config))
    except CheckpointError as exc:
        raise CheckpointError(f"{file}: {exc.message}") from exc


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """``bos_token`` and its kin, as chat templates use them."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _special_ids(rust: RustTokenizer) -> frozenset[int]:
    return frozenset(token for token, added in rust.get_added_tokens_decoder().items() if added.special)


def _is_byte_level(rust: RustTokenizer) -> bool:
    """Whether decoding is nothing but joining the bytes of byte-level tokens."""
    decoder = json.loads(rust.to_str())["decoder"]
    if decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, all other bytes for characters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet (an added token) stands for its own text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
