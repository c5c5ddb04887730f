"""Renders a checkpoint's chat template in jinja2's sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import CheckpointError, InvalidInputError, PromptTooLongError

MAX_WORK = 2**27
"""What a rendering may do: characters that it makes, and more for each call and each turn of a loop. Some seconds."""
MAX_PROBE_WORK = 2**22
"""At load, for a short chat."""
TURN_WORK = 2**7
CALL_WORK = 2**8
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})


_TEXT, _FUNCTION, _CALLED, _KEY = "probe_text", "probe_function", "probe_call", "probe_key"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": _FUNCTION, "description": "", "parameters": _PARAMETERS}}
_CALL = {"id": "probe0001", "type": "function"}
"""Some templates take only ids of nine letters and digits."""
_NO_CONTENT: tuple[dict[str, object], ...] = ({}, {"content": None}, {"content": ""})
"""From the form that transformers gives to a template to the one that any client may send."""
_DEVELOPER = re.compile("""['"]developer['"]""")
_TOOL_ROLE = re.compile("""['"]tool['"]""")


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_python(shown: str, name: str) -> bool:
    """Whether an object was written as Python writes it, not as JSON."""
    return f"'{name}'" in shown


class _Work(threading.local):
    """What is left to the rendering on this thread."""

    left = MAX_WORK

    def spend(self, work: int) -> None:
        """Raises SecurityError."""
        self.left -= work
        if self.left < 0:
            raise SecurityError("it loops or repeats too much")


_work = _Work()


class _CodeGenerator(CodeGenerator):
    """Counts the turns of loops and the calls of macros, and what is joined with ``~``, compared, or cut."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        node.body = [nodes.ExprStmt(_TURN), *node.body]
        node.test = node.test and nodes.And(_TURN, node.test)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        node.body = [nodes.ExprStmt(_TURN), *node.body]
        return super().macro_body(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        # The counting itself, which templates cannot name: not through the sandbox, which would count it.
        self.write(f"environment.{node.node.name}(")
        for arg in node.args:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        joined = nodes.EnvironmentAttribute("joined")
        self.visit(nodes.Call(joined, list(node.nodes), [], None, None), frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        operands = [nodes.Operand(operand.op, _looked_at(operand.expr)) for operand in node.ops]
        super().visit_Compare(nodes.Compare(_looked_at(node.expr), operands), frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            node = nodes.Getitem(_looked_at(node.node), node.arg, node.ctx)
        super().visit_Getitem(node, frame)


def _looked_at(node: nodes.Expr) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute("paid"), [node], [], None, None)


_TURN = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)


class _Generation(Extension):
    """``{% generation %}`` marks what the model has written, for training. Here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose work is bounded, whatever a template or a message says. Work is paid before it is done."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        extensions = [loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_paid)
        self.filters = {
            name: _bounded(name, function) for name, function in {**self.filters, "tojson": _tojson}.items()
        }
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: _bounded(name, function) for name, function in tests.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def paid(self, value: Any) -> Any:
        """A text or list that is compared, searched or copied in part."""
        return _paid(value)

    def turn(self) -> bool:
        _work.spend(TURN_WORK)
        return True

    def joined(self, *parts: object) -> str:
        _work.spend(CALL_WORK + _cost("+", parts))
        return str(_paid("".join(map(str, parts))))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _work.spend(CALL_WORK + left.bit_length() * abs(right))
        else:
            _work.spend(CALL_WORK + _cost(operator, (left, right)))
        return _paid(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        cost = CALL_WORK
        if not isinstance(__obj, Macro):  # which counts what it does
            # The sandbox wraps ``str.format``.
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            cost += _cost(getattr(__obj, "__name__", ""), (owner, *args, *kwargs.values()))
        _work.spend(cost)
        return _paid(super().call(__context, __obj, *args, **kwargs))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _work.spend(CALL_WORK + _cost(name, (*args, *kwargs.values())))
        return _paid(function(*args, **kwargs))

    return bounded


def _paid(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _work.spend(len(value))
    return value


def _cost(name: str, values: Sequence[Any]) -> int:
    """At least the characters or items that a function of this name, or an operator, makes of the values; a number may
    be a width or a count, and so may one in a format."""
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) > 2:
        return len(texts[0]) + texts[0].count(texts[1]) * len(texts[2])
    lists = [value for value in values if isinstance(value, (list, tuple))]
    size = 1 + sum(map(len, texts)) + sum(map(len, lists))
    if name == "join":
        return size + sum(
            sum(map(len, texts)) + (len(item) if isinstance(item, str) else 1) for items in lists for item in items
        )
    if name in ("format", "%") and texts:
        values = [*values, *(item for items in lists for item in items), *map(int, _NUMBER.findall(texts[0]))]
    numbers = [value for value in values if isinstance(value, int)]
    if name == "safe_range":
        return size + abs(numbers[0] - sum(numbers[1:2]))
    for number in numbers if name != "+" else ():
        size *= max(1, abs(number))
    return size


_NUMBER = re.compile(r"[0-9]{1,18}")


REFUSED = "the chat template refuses these messages"


class RefusedMessagesError(InvalidInputError):
    """The template's own words, which may quote the messages."""

    @property
    def noted(self) -> str:
        return REFUSED


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, this one does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _joined(pieces: Iterable[str], max_chars: int) -> str:
    """Raises PromptTooLongError once the text is too long: a template may repeat a few messages without end."""
    found: list[str] = []
    num_chars = 0
    for piece in pieces:
        found.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise PromptTooLongError(
                f"The chat template turns these messages into more than {max_chars} characters; they cannot fit."
            )
    return "".join(found)


class MessageForm(msgspec.Struct, frozen=True):
    """What a template takes, as renderings of short chats show."""

    takes_text: bool = True
    takes_parts: bool = False
    """Content may be a list of parts, and must be if ``takes_text`` is false."""
    takes_system: bool = True
    knows_developer: bool = False
    knows_tools: bool = False
    """It shows the functions that can be called."""
    writes_calls: bool = False
    writes_results: bool = False
    text_arguments: bool = False
    """It joins the arguments of a call with other text. Most templates turn an object into JSON themselves."""
    no_content: Mapping[str, object] = {}
    """The content of a message that has only calls: missing, None or empty."""
    called: str = ""
    """A chat with a call; empty if it does not write calls."""


class ChatTemplate:
    """A compiled template. ``special_tokens`` are names such as ``bos_token`` with their text; ``tool_use`` is the
    template for chats with functions, if there is another one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: ChatTemplate | None = None) -> None:
        environment = _Environment()
        _work.left = MAX_PROBE_WORK
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as exc:
            # SyntaxError and RecursionError come from Python's own compiler, for templates that are nested too deeply.
            raise CheckpointError(f"the chat template is malformed: {exc}") from exc
        self._special_tokens = dict(special_tokens)
        self._tool_use = tool_use
        self.source = source
        self._max_work = MAX_PROBE_WORK
        try:
            self.render(_PROBE)
        except InvalidInputError as exc:
            # A template may refuse a conversation, but no template needs a second for it.
            if _work.left < 0:
                raise CheckpointError(f"the chat template is refused: of a short chat, {exc.__cause__}") from exc
        self.form = self._probed()
        self._max_work = MAX_WORK

    def chosen(self, has_tools: bool) -> ChatTemplate:
        """The template for a chat, with functions or without."""
        return self._tool_use if has_tools and self._tool_use is not None else self

    def _probed(self) -> MessageForm:
        plain = self._shown(_user(_TEXT))
        parts = self._shown(_user(_parts(_TEXT)))
        takes_parts = _TEXT in parts and not _is_python(parts, "text") and '"text"' not in parts
        takes_text = _TEXT in plain or not takes_parts
        content = str if takes_text else _parts
        user = _user(content("a"))
        system = {"role": "system", "content": content(_TEXT)}
        listed = self._shown(user, with_tool=True) + self._shown(system, user, with_tool=True)
        form = MessageForm(
            takes_text,
            takes_parts,
            takes_system=_TEXT in self._shown(system, user),
            knows_developer=_DEVELOPER.search(self.source) is not None,
            knows_tools=_FUNCTION in listed or (not plain and not parts and "tools" in self.source),
        )
        result = {"role": "tool", "content": content(_TEXT), "tool_call_id": _CALL["id"], "name": _CALLED}
        answered = result, {"role": "assistant", "content": content("b")}, user
        found = None
        for arguments, no_content in itertools.product(({_KEY: ""}, json.dumps({_KEY: ""})), _NO_CONTENT):
            function = {"name": _CALLED, "arguments": arguments}
            calling = {"role": "assistant", **no_content, "tool_calls": [{**_CALL, "function": function}]}
            shown = self._shown(user, calling, *answered)
            if _CALLED not in shown or _KEY not in shown:
                continue
            is_good = not (_is_python(shown, _KEY) or f'\\"{_KEY}' in shown or "None" in shown)
            if is_good or found is None:
                found = msgspec.structs.replace(
                    form,
                    writes_calls=True,
                    writes_results=_TEXT in shown,
                    text_arguments=isinstance(arguments, str),
                    no_content=no_content,
                    called=shown,
                )
            if is_good:
                break
        if found is not None or not _TOOL_ROLE.search(self.source):
            return found or form
        shown = self._shown(user, {"role": "assistant", "content": content("b")}, *answered)
        return msgspec.structs.replace(form, writes_results=_TEXT in shown)

    def _shown(self, *messages: Mapping[str, object], with_tool: bool = False) -> str:
        """A short chat; empty if it is refused. Some templates for chats with functions refuse all others."""
        for tools in ((_TOOL,),) if with_tool else ((), (_TOOL,)):
            with contextlib.suppress(InvalidInputError):
                return self.render(messages, tools=tools)
        return ""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        max_chars: int = sys.maxsize,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt.

        Raises InvalidInputError if the template refuses the messages, PromptTooLongError if it writes more than
        ``max_chars``.
        """
        names: dict[str, object] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(arguments or {}),
            **({"tools": tools} if tools else {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        _work.left = self._max_work
        try:
            return _joined(self._template.generate(names), max_chars)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            MemoryError,
            RecursionError,
        ) as exc:
            raise RefusedMessagesError(f"{REFUSED}: {exc}", param="messages") from exc
