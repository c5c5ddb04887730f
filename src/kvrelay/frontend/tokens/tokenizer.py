"""The checkpoint's tokenizer: text to tokens and back, without the transformers package (its import costs seconds).

It reads ``tokenizer.json`` (the whole algorithm), ``tokenizer_config.json`` (special tokens, chat template),
``chat_template.jinja`` or ``.json`` and ``generation_config.json`` (the model's recommended sampling). It does not know
requests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.frontend.side_threads import Pieces, complete
from kvrelay.frontend.tokens.chat_template import ChatTemplate
from kvrelay.frontend.tokens.detokenizer import ByteLevelDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer
from kvrelay.frontend.tokens.text_pieces import NFC_SHRINKAGE, cut_text, may_be_cut


class DefaultSampling(msgspec.Struct, frozen=True):
    """The defaults of ``generation_config.json`` for fields that a request does not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


NO_DEFAULTS = DefaultSampling()
PIECE_CHARS = 2**15
"""Characters that are tokenized in one call, which takes about 10 ms."""
MAX_BATCH = 256
MAX_CHARS_PER_TOKEN = 1024
"""For tokenizers without a known better bound."""


class Tokenizer:
    """Thread-safe for ``encode`` and ``decode``."""

    def __init__(
        self,
        rust: RustTokenizer,
        chat_template: ChatTemplate | None = None,
        default_sampling: DefaultSampling = NO_DEFAULTS,
    ) -> None:
        rust.no_truncation()
        rust.no_padding()
        self.rust = rust
        self._special = _special_ids(rust)
        self._byte_level = _is_byte_level(rust)
        self.vocab_size = int(rust.get_vocab_size(with_added_tokens=True))
        self._tokens = self._token_bytes() if self._byte_level else None
        self.frame = _frame(rust) if self._byte_level and may_be_cut(rust) else None
        """The special tokens around a text that may be cut into pieces; None: texts are not cut."""
        self.max_chars_per_token = self._max_chars_per_token()
        self.default_sampling = default_sampling
        self.chat_template = chat_template

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, byte_level={self._byte_level})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidInputError for text that is not valid Unicode (lone surrogates)."""
        return complete(self.encode_texts([text], add_special_tokens))[0]

    def encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool, enough: int = sys.maxsize
    ) -> Pieces[list[list[int]]]:
        """The tokens of each text, in pieces that do not hold the interpreter's lock.

        It may stop once a text has more than ``enough`` tokens, and then returns the tokens known so far. Raises
        InvalidInputError for text that is not valid Unicode (lone surrogates).
        """
        before, behind = self.frame if self.frame is not None and add_special_tokens else ([], [])
        if len(texts) == 1 and (self.frame is None or len(texts[0]) <= PIECE_CHARS):
            return [[*before, *ids, *behind] for ids in self.encode_batch(list(texts), add_special_tokens)]
        found: list[list[int]] = [list(before) for _ in texts]
        for batch in _batches(self._cut(texts)):
            pieces = [piece for _, piece in batch]
            for (index, _), ids in zip(batch, self.encode_batch(pieces, add_special_tokens)):
                found[index] += ids
            yield
            if len(found[batch[-1][0]]) > enough:
                return found
        return [ids + behind for ids in found] if behind else found

    def _cut(self, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Each text in one piece or several, with its number."""
        for index, text in enumerate(texts):
            for piece in [text] if self.frame is None else cut_text(text, PIECE_CHARS):
                yield index, piece

    def encode_batch(self, pieces: list[str], add_special_tokens: bool) -> Iterator[list[int]]:
        """The tokens of each piece. Raises InvalidInputError.

        Unlike the library's ``encode`` this releases the interpreter's lock; "fast" leaves out the offsets.
        """
        with_special = add_special_tokens and self.frame is None
        try:
            encodings = self.rust.encode_batch_fast(pieces, add_special_tokens=with_special)
        except (TypeError, UnicodeEncodeError) as exc:
            raise InvalidInputError("the text is not valid Unicode", param="prompt") from exc
        return (encoding.ids for encoding in encodings)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        # A batch of one, because ``decode`` holds the interpreter's lock.
        return str(self.rust.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def token_text(self, token_id: int) -> str:
        """One token as text by itself, special or not; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        if self._tokens is not None:
            pieces = self._tokens[False].pieces
            return pieces[token_id] if token_id < len(pieces) else b""
        return self.decode([token_id]).encode()

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self.rust.id_to_token(token_id) or "")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer, for one sequence."""
        if self._tokens is not None:
            return ByteLevelDetokenizer(self._tokens[skip_special_tokens])
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def _token_bytes(self) -> dict[bool, TokenBytes]:
        """Each token's bytes, for skipped and for shown special tokens. Made here, so that the first request does not
        wait."""
        pieces = [_byte_level_piece(self.token_string(token)) for token in range(self.vocab_size)]
        return {False: TokenBytes(pieces, frozenset()), True: TokenBytes(pieces, self._special)}

    def _max_chars_per_token(self) -> int:
        """Upper bound of the characters that this number of tokens can cover."""
        has_all_bytes = all(self.rust.token_to_id(char) is not None for char in _ALPHABET)
        if self.frame is None or self._tokens is None or not has_all_bytes:
            return MAX_CHARS_PER_TOKEN
        longest = max(map(len, self._tokens[False].pieces))
        return longest * (1 if self.rust.normalizer is None else NFC_SHRINKAGE)


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
    defaults_file = model_path / "generation_config.json"
    try:
        defaults = msgspec.convert(_read_json(defaults_file), DefaultSampling)
    except msgspec.ValidationError as exc:
        raise CheckpointError(f"{defaults_file} is malformed: {exc}") from exc
    return Tokenizer(rust, _chat_template(model_path, _read_json(model_path / "tokenizer_config.json")), defaults)


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
        raise CheckpointError(f"{file}: the chat template is not text")
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
    """``bos_token`` and the like, as chat templates use them."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces that are tokenized in one call: one long one, or some short ones."""
    batch: list[tuple[int, str]] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece[1])
        if num_chars >= PIECE_CHARS or len(batch) >= MAX_BATCH:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _frame(rust: RustTokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and after a text; None if they are not simply around it."""
    inner = rust.encode("a", add_special_tokens=False).ids
    whole = rust.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return None


def _special_ids(rust: RustTokenizer) -> frozenset[int]:
    return frozenset(token for token, added in rust.get_added_tokens_decoder().items() if added.special)


def _is_byte_level(rust: RustTokenizer) -> bool:
    """Whether decoding only joins the bytes of byte-level tokens."""
    decoder = json.loads(rust.decoder.__getstate__()) if rust.decoder is not None else None
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
    """A token's bytes. A token with a character outside the alphabet (an added token) stands for its own text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
