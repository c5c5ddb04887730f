"""Chat templates: the names they expect, the sandbox, and errors that are the client's."""

from __future__ import annotations

import pytest

from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.frontend.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a <b> 'c' é"}]


def render(source: str, **arguments: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, True, arguments)


def test_names_that_templates_expect_are_defined() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s>a <b> 'c' é"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "a <b> \'c\' é"}]'
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% if tools %}x{% endif %}{% if add_generation_prompt %}y{% endif %}") == "y"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{%- set ns = namespace(n=1) -%}{{ ns.n }}") == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ missing.attribute }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_refusals_and_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_malformed_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}", {})
