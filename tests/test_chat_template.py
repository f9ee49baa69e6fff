"""Chat templates: what transformers makes of them, within limits of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from dipaco.inference.service.chat_template import ChatTemplate, TemplateError
from dipaco.modules.errors import ConfigurationError
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [{"role": "user", "content": "Zoë & Ann's <b>"}]


@pytest.fixture
def opened() -> Iterator[Callable[..., ChatTemplate]]:
    made: list[ChatTemplate] = []

    def open_template(text: str, limit_s: float = 5.0) -> ChatTemplate:
        made.append(ChatTemplate(text, limit_s))
        return made[-1]

    yield open_template
    for template in made:
        template.close()


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}<{{ m.role }}>{{ {'text': m.content} | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ bos_token }}",
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{% if add_generation_prompt %}<a>{% endif %}{{ eos_token }}",
    ],
)
def test_it_gives_what_transformers_gives(opened: Callable[..., ChatTemplate], text: str) -> None:
    [expected], _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=text, add_generation_prompt=True,
        bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    assert opened(text).render(MESSAGES, "<s>", "</s>") == expected


@pytest.mark.parametrize(
    "text",
    [
        "{% if messages %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}"
        "{% endfor %}{% endif %}",
        "{% set n = namespace(x=messages[0].content) %}{% for a in range(99) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_one_that_loops_or_grows_is_ended(opened: Callable[..., ChatTemplate], text: str) -> None:
    template = opened(text, limit_s=1.0)
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(TemplateError):
            template.render(MESSAGES, "<s>", "</s>")
    assert time.monotonic() - began_s < 20


def test_it_goes_on_after_a_refusal(opened: Callable[..., ChatTemplate]) -> None:
    text = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}well"
    template = opened(text)
    with pytest.raises(TemplateError, match="no tools"):
        template.render([{"role": "tool", "content": ""}], "<s>", "</s>")
    assert template.render(MESSAGES, "<s>", "</s>") == "well"


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the chat template cannot be used: .*endfor"):
        ChatTemplate("{% for m in messages %}")
