"""An answer's blocks are the same however its text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.frontend.test_openai_tools import CALLS

from kvrelay.core.status import FinishReason
from kvrelay.frontend.generate.answer_blocks import AnswerBlocks, BlockKind, BlockStep
from kvrelay.frontend.openai.answer import Choice, ChoicePiece, Finish, OutputParser
from kvrelay.frontend.tools.dialects import HERMES
from kvrelay.frontend.tools.parsing import ToolParser
from kvrelay.frontend.tools.reasoning import ReasoningParser

TEXT = f"<think>Hm, {CALLS[:30]}</think> {CALLS}"


def parser() -> OutputParser:
    return ReasoningParser(False, ToolParser(HERMES, frozenset({"add", "now"})))


@given(cuts=st.sets(st.integers(0, len(TEXT))))
def test_pieces_make_no_difference(cuts: set[int]) -> None:
    ends = [*sorted(cuts), len(TEXT)]
    pieces = [TEXT[start:end] for start, end in zip([0, *ends], ends)]
    last = ChoicePiece("", (), finish=Finish(FinishReason.STOP))
    choice = Choice(0, (1,), pieces=[*(ChoicePiece(text, (1,)) for text in pieces), last])
    blocks = AnswerBlocks.of(choice, parser())
    found = [(block.index, block.kind, block.name) for block in blocks.blocks]
    assert found == [
        (0, BlockKind.REASONING, ""),
        (1, BlockKind.TEXT, ""),
        (2, BlockKind.CALL, "add"),
        (3, BlockKind.CALL, "now"),
    ]
    assert blocks.blocks[2].text == '{"a": 1, "b": "é🙂"}'
    assert 0 < blocks.num_reasoning_tokens <= len(pieces)


def test_steps_open_grow_and_close_one_block_at_a_time() -> None:
    blocks = AnswerBlocks(parser())
    steps = [event for char in TEXT for event in blocks.push(char, 1)]
    steps += blocks.end()
    is_open = False
    for event in steps:
        assert is_open == (event.step is not BlockStep.OPENED)
        is_open = event.step is not BlockStep.CLOSED
    assert not is_open
    for block in blocks.blocks:
        assert block.text == "".join(event.text for event in steps if event.block is block)
