"""Chat templates: the names they expect, the sandbox, and errors that are the client's."""

from __future__ import annotations

import pytest

from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.frontend.tokens.chat_template import ChatTemplate

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
        "{{ 1 / (messages | length - 1) }}",
        "{{ '{} {}'.format(messages[0].role) }}",
    ],
)
def test_refusals_and_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_malformed_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ range(10000000) | list }}",
        "{% set x = [0] * 10**9 %}",
        "{% set x = 'a' | center(10**9) %}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ lipsum(n=1000000000) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[[]]] recursive %}{{ loop([[], []] if loop.depth < 40 else []) }}"
        "{{ loop([[], []] if loop.depth < 40 else []) }}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
        "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
        "{% set x = 'a' * 10**6 %}{% for i in range(10**5) %}{% if 'ab' in x %}{% endif %}{% endfor %}",
        "{% set x = 'a' * 10**6 %}{% for i in range(10**5) %}{% set y = x[1:] %}{% endfor %}",
        "{% set x = 'a' * 10**6 %}{% for i in range(10**5) %}{% if 'ab' is in x %}{% endif %}{% endfor %}",
        "{% for i in range(10**4) %}{% set x = messages | tojson %}{% endfor %}",
    ],
)
def test_a_template_that_works_for_ever_is_refused_at_load(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"chat template is refused: .* loops or repeats too much") as caught:
        ChatTemplate(source, {})
    assert "\n" not in caught.value.message


def test_what_a_client_makes_a_template_do_is_bounded() -> None:
    source = "{% for a in range(n or 0) %}{% for b in range(n or 0) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    template = ChatTemplate(source, {})
    assert template.render(MESSAGES, True, {"n": 30}) == MESSAGES[0]["content"]
    with pytest.raises(InvalidInputError, match="too much"):
        template.render(MESSAGES, True, {"n": 90_000})
    assert template.render(MESSAGES, True) == MESSAGES[0]["content"], "each rendering has its own bound"


def test_long_chats_are_within_the_bound() -> None:
    source = (
        "{% for m in messages %}{{ '<|' ~ m.role + '|>' }}"
        "{% if m.content is string %}{% set c = m.content %}{% endif %}"
        "{{ c.split('</think>')[-1].lstrip('\n') | trim | replace('\r', '') + '\n' }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    long = [{"role": "user", "content": "word " * 2**19}] * 3
    assert len(template.render(long)) > 3 * 5 * 2**19 - 10
    many = [{"role": "user", "content": "word"}] * 10_000
    assert len(template.render(many)) == 10_000 * len("<|user|>word\n")


def test_templates_that_look_at_all_messages_for_each_are_within_the_bound() -> None:
    source = (
        "{% macro line(text, index) %}{{ text }}{% endmacro %}"
        "{% for m in messages %}{% set at = loop.index0 %}{% set found = namespace(n=0) %}"
        "{% for k in range(at + 1, messages | length) %}"
        "{% if messages[k].role == 'tool' and messages[k].content == m.content %}{% set found.n = k %}{% endif %}"
        "{% endfor %}{{ line(m.content, at) }}{% endfor %}"
    )
    text = "word " * 200
    messages = [{"role": "user", "content": text}] * 500
    assert ChatTemplate(source, {}).render(messages) == text * 500
