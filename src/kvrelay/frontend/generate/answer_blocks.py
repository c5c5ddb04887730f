"""An answer as blocks, one after the other: reasoning, text and function calls. Pure.

For APIs whose answers are lists of blocks. Whole answers and streams are parsed by the same steps, piece by piece, so
that both have the same blocks.
"""

from __future__ import annotations

import enum
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec

from kvrelay.frontend.openai.answer import (
    AnswerContext,
    CallDelta,
    Choice,
    ChoicePiece,
    Finish,
    OutputParser,
    ParsedDelta,
    Usage,
    encode_json,
    with_extra,
)


class BlockKind(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


class BlockStep(enum.Enum):
    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


class Block(msgspec.Struct):
    """``text`` is that of a text or of reasoning, or a call's arguments as JSON. ``name`` is the function's."""

    index: int
    kind: BlockKind
    name: str = ""
    pieces: list[str] = []
    unique: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """For ids that must differ from block to block."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockEvent(msgspec.Struct, frozen=True):
    """``text`` is the new piece of a block that GREW."""

    step: BlockStep
    block: Block
    text: str = ""


class AnswerBlocks:
    """The blocks of one answer, as they arrive. ``parser`` parses the text; without a parser all of it is text."""

    def __init__(self, parser: OutputParser | None) -> None:
        self.blocks: list[Block] = []
        self.num_reasoning_tokens = 0
        """With those of its marks, as far as pieces of text can tell."""
        self._parser = parser
        self._open: Block | None = None
        self._num_waiting = 0
        """Tokens before the first block."""

    @classmethod
    def of(cls, choice: Choice, parser: OutputParser | None) -> AnswerBlocks:
        """Those of a whole answer."""
        blocks = cls(parser)
        for piece in choice.pieces:
            for _ in blocks.push(piece.text, len(piece.token_ids)):
                pass
        for _ in blocks.end():
            pass
        return blocks

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def push(self, text: str, num_tokens: int) -> Iterator[BlockEvent]:
        """Add text of the given number of tokens."""
        delta = self._parser.push(text) if self._parser is not None else ParsedDelta(content=text)
        yield from self._take(delta)
        if not self.blocks:
            self._num_waiting += num_tokens
            return
        if self.blocks[0].kind is BlockKind.REASONING and (delta.reasoning or self.blocks[-1] is self.blocks[0]):
            self.num_reasoning_tokens += num_tokens + self._num_waiting
        self._num_waiting = 0

    def end(self) -> Iterator[BlockEvent]:
        """The text has ended."""
        if self._parser is not None:
            yield from self._take(self._parser.flush())
        yield from self._close()

    def _take(self, delta: ParsedDelta) -> Iterator[BlockEvent]:
        if delta.reasoning:
            yield from self._grow(BlockKind.REASONING, delta.reasoning)
        if delta.content:
            yield from self._grow(BlockKind.TEXT, delta.content)
        for call in delta.calls:
            yield from self._call(call)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield BlockEvent(BlockStep.GREW, self._open, text)

    def _call(self, call: CallDelta) -> Iterator[BlockEvent]:
        if call.name is not None:
            yield from self._begin(BlockKind.CALL, call.name)
        if call.arguments:
            yield from self._grow(BlockKind.CALL, call.arguments)

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockEvent]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield BlockEvent(BlockStep.OPENED, self._open)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent(BlockStep.CLOSED, self._open)
        self._open = None


def named_event(kind: str, **fields: object) -> bytes:
    """A server-sent event of this name; its data has the name as its type."""
    return b"event: " + kind.encode() + b"\ndata: " + encode_json({"type": kind, **fields}) + b"\n\n"


class BlockFormat(ABC):
    """The half of an ``AnswerFormat`` that all APIs with blocks share; an answer has one choice."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._blocks = AnswerBlocks(context.new_parser())
        self._finish: Finish | None = None

    def chunk(self, index: int, piece: ChoicePiece, usage: Usage | None) -> bytes:
        """The events of the blocks that the piece opens, continues and closes."""
        events = [self._event_of(event) for event in self._blocks.push(piece.text, len(piece.token_ids))]
        if piece.finish is not None:
            self._finish = piece.finish
            events += map(self._event_of, self._blocks.end())
        return b"".join(events)

    def closing(self, usage: Usage, extra: bytes = b"") -> bytes:
        """The last events."""
        assert self._finish is not None
        end = self._end_of(self._finish, usage)
        return with_extra(end, extra) if extra else end

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        return self._whole_of(choice, AnswerBlocks.of(choice, self._context.new_parser()), usage)

    @abstractmethod
    def _event_of(self, event: BlockEvent) -> bytes: ...

    @abstractmethod
    def _end_of(self, finish: Finish, usage: Usage) -> bytes: ...

    @abstractmethod
    def _whole_of(self, choice: Choice, blocks: AnswerBlocks, usage: Usage) -> bytes: ...
