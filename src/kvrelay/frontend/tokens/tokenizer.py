"""The checkpoint's tokenizer: text to tokens and back, without the transformers package (its import costs seconds).

It reads ``tokenizer.json`` (the whole algorithm), ``tokenizer_config.json`` (special tokens, chat template),
``special_tokens_map.json`` and ``added_tokens.json`` of older checkpoints, the other files of chat templates, and
``generation_config.json`` (the model's recommended sampling). It does not know requests.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from kvrelay.core.sampling import SamplingParams
from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.executors.checkpoint_facts import is_there, optional_json_object
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

    @property
    def given(self) -> dict[str, float]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NO_DEFAULTS = DefaultSampling()
PIECE_CHARS = 2**15
"""Characters that are tokenized in one call, which takes about 10 ms."""
MAX_BATCH = 256
MAX_VOCAB_SIZE = 2**22
"""Above every real one. All ids up to the largest take memory."""
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
        added = rust.get_added_tokens_decoder()
        self.markers = {token.content: number for number, token in added.items()}
        """Ids of the tokens that stand for one meaning, special or not: ends, roles, what opens a call."""
        self._special = frozenset(number for number, token in added.items() if token.special)
        vocab = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise CheckpointError(f"tokenizer.json is damaged: it has a token with the id {self.vocab_size - 1:,}")
        spell = _spelling(rust)
        self._byte_level = spell is _byte_level_piece
        self._pieces = None if spell is None else _pieces(vocab, self.markers, self.vocab_size, spell, rust)
        bytes_alone = () if self._byte_level else enumerate(self._pieces or ())
        self._byte_of = {token: piece[0] for token, piece in bytes_alone if len(piece) == 1 and piece[0] >= 0x80}
        # Made here, so that the first request does not wait.
        self._tokens = {hidden: self._token_bytes(hidden) for hidden in (frozenset[int](), self._special)}
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
        """The bytes of one token, wherever it stands in a text."""
        if self._pieces is not None:
            return self._pieces[token_id] if token_id < len(self._pieces) else b""
        return self.decode([token_id]).encode()

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self.rust.id_to_token(token_id) or "")

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = (), shown: Sequence[str] = ()
    ) -> Detokenizer:
        """A new detokenizer, for one sequence after this prompt. ``shown``: special tokens that are not skipped."""
        hidden = self._special if skip_special_tokens else frozenset()
        if shown and hidden:
            hidden = hidden.difference(map(self.markers.get, shown))
        if self._byte_level:
            tokens = self._tokens.get(hidden)
            if tokens is None:
                tokens = self._tokens[hidden] = self._token_bytes(hidden)
            return ByteLevelDetokenizer(tokens, prompt_token_ids)

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode([token for token in token_ids if token not in hidden])

        return WindowDetokenizer(decode, prompt_token_ids, self._byte_of)

    def _token_bytes(self, hidden: frozenset[int]) -> TokenBytes:
        return TokenBytes(self._pieces or () if self._byte_level else (), hidden)

    def _max_chars_per_token(self) -> int:
        """Upper bound of the characters that this number of tokens can cover."""
        has_all_bytes = all(self.rust.token_to_id(char) is not None for char in _ALPHABET)
        if self.frame is None or self._pieces is None or not has_all_bytes:
            return MAX_CHARS_PER_TOKEN
        longest = max(map(len, self._pieces))
        return longest * (1 if self.rust.normalizer is None else NFC_SHRINKAGE)


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{model_path} has no tokenizer.json")
    try:
        rust = RustTokenizer.from_file(str(file))
        if rust.post_processor is not None:
            _check_template(json.loads(rust.post_processor.__getstate__()))
        rust.encode("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # the binding raises bare Exception, and for a panic a BaseException of its own
        raise CheckpointError(f"cannot load {file}: {exc}") from exc
    config = dict(optional_json_object(model_path / "tokenizer_config.json"))
    if "added_tokens_decoder" not in config:
        config |= optional_json_object(model_path / "special_tokens_map.json")
    special_tokens = _special_tokens(config)
    try:
        _add_tokens(rust, config, special_tokens, optional_json_object(model_path / "added_tokens.json"))
    except (TypeError, ValueError, AttributeError) as exc:
        files = "tokenizer_config.json, special_tokens_map.json or added_tokens.json"
        raise CheckpointError(f"{model_path}: special tokens in {files} are malformed: {exc}") from exc
    return Tokenizer(rust, _chat_template(model_path, special_tokens), _default_sampling(model_path))


def _check_template(processor: Mapping[str, Any]) -> None:
    """Raises ValueError for a template of one text that the library cannot fill: it panics, and prints pages."""
    for inner in processor.get("processors", ()):
        _check_template(inner)
    for piece in processor["single"] if processor.get("type") == "TemplateProcessing" else ():
        (kind, value), *_ = piece.items()
        if kind == "SpecialToken" and value["id"] not in processor["special_tokens"]:
            raise ValueError(f"the post_processor's template has the token {value['id']}, its special_tokens do not")
        if kind == "Sequence" and value["id"] != "A":
            raise ValueError("the post_processor's template of one text has a second one")


def _default_sampling(model_path: Path) -> DefaultSampling:
    file = model_path / "generation_config.json"
    content = optional_json_object(file)
    try:
        defaults = msgspec.convert(content, DefaultSampling)
        SamplingParams(**defaults.given).validate()  # type: ignore[arg-type]
    except (msgspec.ValidationError, InvalidInputError) as exc:
        raise CheckpointError(f"{file} has a default that no request can use: {exc}; correct or remove it") from exc
    return defaults


def _add_tokens(
    rust: RustTokenizer, config: Mapping[str, Any], named: Mapping[str, str], old: Mapping[str, Any]
) -> None:
    """Adds tokens that are not in ``tokenizer.json``, and flags of those that are, as transformers does: by the ids
    that the files give them, but with the next free ids. ``old`` are texts and ids. Raises TypeError, ValueError or
    AttributeError."""
    known = [*rust.get_added_tokens_decoder().values()]
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        by_id = {int(token_id): _added_token(value) for token_id, value in listed.items()}
    else:
        is_special = set(named.values()).__contains__
        by_id = {
            int(token_id): AddedToken(text, normalized=not is_special(text), special=is_special(text))
            for text, token_id in old.items()
            if text not in {token.content for token in known}
        }
    flags = set(map(repr, known))
    new = [by_id[token_id] for token_id in sorted(by_id) if repr(by_id[token_id]) not in flags]
    texts = {token.content for token in [*known, *new]}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    more = [config.get(name, text) for name, text in named.items()]
    more += extra if not isinstance(extra, dict) else ()
    for token in map(_added_token, more):
        if token.content not in texts:
            texts.add(token.content)
            new.append(token)
    for token in new:
        token.special = token.special or token.content in named.values()
    rust.add_tokens(new)
    rust.encode_special_tokens = config.get("split_special_tokens") is True


def _added_token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: flag for name, flag in value.items() if name != "__type"})


def _chat_template(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template for chats without functions, with the one for chats with functions if that is another one."""
    found = _chat_templates(path)
    default = found.get("default")
    if default is None:
        return None
    tool_use = _compiled(*found["tool_use"], special_tokens) if "tool_use" in found else None
    return _compiled(*default, special_tokens, tool_use)


def _chat_templates(path: Path) -> dict[str, tuple[Path, object]]:
    """The templates by name, each with its file. A file of its own goes before a field of another file."""
    files = {"default": path / "chat_template.jinja", "tool_use": path / "additional_chat_templates" / "tool_use.jinja"}
    found: dict[str, tuple[Path, object]] = {
        name: (file, _read_text(file)) for name, file in files.items() if is_there(file)
    }
    for file in (path / "chat_template.json", path / "tokenizer_config.json"):
        if "default" not in found:
            template = optional_json_object(file).get("chat_template")
            if isinstance(template, list):
                named = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
            else:
                named = {"default": template} if template is not None else {}
            for name, text in named.items():
                found.setdefault(name, (file, text))
    return found


def _compiled(
    file: Path, template: object, special_tokens: Mapping[str, str], tool_use: ChatTemplate | None = None
) -> ChatTemplate:
    if not isinstance(template, str):
        raise CheckpointError(f"{file}: the chat template is not text")
    try:
        return ChatTemplate(template, special_tokens, tool_use)
    except CheckpointError as exc:
        raise CheckpointError(f"{file}: {exc.message}") from exc


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """``bos_token`` and the like, as chat templates use them; ``extra_special_tokens`` may name others."""
    tokens: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for name, value in [*config.items(), *(extra.items() if isinstance(extra, dict) else ())]:
        if name.endswith("_token") or (isinstance(extra, dict) and name in extra):
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


def _spelling(rust: RustTokenizer) -> Callable[[str], bytes] | None:
    """How the vocabulary spells bytes; None if the decoder does more than join the bytes of tokens."""
    decoder = json.loads(rust.decoder.__getstate__()) if rust.decoder is not None else {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    by_type = {step.get("type"): step for step in steps}
    if list(by_type) == ["ByteLevel"]:
        return _byte_level_piece
    if "ByteFallback" not in by_type and "Metaspace" not in by_type:
        return None
    space = by_type["Metaspace"]["replacement"] if "Metaspace" in by_type else "\u2581"
    has_bytes = "ByteFallback" in by_type

    def piece(token: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(token) if has_bytes and token.startswith("<0x") else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode("utf-8", "replace")

    return piece


def _pieces(
    vocab: dict[str, int], markers: dict[str, int], size: int, spell: Callable[[str], bytes], rust: RustTokenizer
) -> tuple[bytes, ...]:
    """Each token's bytes. An added token stands for its own text, unless that is normalized."""
    pieces = [b""] * size
    for token, number in vocab.items():
        pieces[number] = spell(token)
    for text, number in markers.items():
        shown = rust.id_to_token(number) or text
        pieces[number] = text.encode("utf-8", "replace") if shown == text else spell(shown)
    return tuple(pieces)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, all other bytes for characters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte that no other token of a SentencePiece vocabulary has."""


def _byte_level_piece(token: str) -> bytes:
    """A token's bytes. A token with a character outside the alphabet (an added token) stands for its own text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
