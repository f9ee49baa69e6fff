"""Chat templates: what transformers makes of them, within limits of time and memory."""

import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dipaco.base.errors import ConfigurationError
from dipaco.routing.documents.chat_template import ChatTemplate, TemplateError

MESSAGES = [{"role": "user", "content": "Zoë & Ann's <b>"}]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture
def opened():
    made = []

    def open_template(text, limit_s=5.0):
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
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{% if add_generation_prompt %}<a>{% endif %}{{ eos_token }}",
        "{%- if tools is defined and tools is none %}no tools{% endif %}{{ documents }}{{ sep }}",
        "{% for m in messages %}\n  {% if m %}\n {{- unk_token }}\n{% endif %}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(a=1) %}{% set n.a = dict(b=2) %}{{ n.a | tojson }}\r\n  {# a #}\r\n",
        "{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
        "{{ messages[0].content | upper | trim }}{{ '%s' | format(pad_token) }}{{ 1.0 / 3 }}",
        "{% macro a(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call a(1) %}b{% endcall %}\n",
    ],
)
def test_it_gives_what_transformers_gives(opened, text):
    [expected], _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=text, add_generation_prompt=True, **SPECIAL
    )
    assert opened(text).render(MESSAGES, SPECIAL) == expected


def test_every_day_a_template_is_filled_with_the_same_date(opened):
    """Else the tokens of a run, and their hashes, would depend on the day on which it was prepared."""
    assert opened("{{ strftime_now('%d %b %Y') }}").render(MESSAGES, SPECIAL) == "26 Jul 2024"


def test_a_base_without_a_template_has_one_in_the_examples(opened):
    text = (Path(__file__).parents[2] / "examples/chat.jinja").read_text()
    said = [{"role": "user", "content": "Hi."}]
    assert opened(text).render(said, SPECIAL) == "User: Hi.\n\nAssistant:"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ab"),
        ("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}",
         "<a><b>"),
    ],
)  # fmt: skip
def test_a_content_of_parts(opened, text, expected):
    parts = [{"type": "text", "text": letter} for letter in "ab"]
    assert opened(text).render([{"role": "user", "content": parts}], SPECIAL) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{% if messages %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endif %}",
        "{% set n = namespace(x=messages[0].content) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_one_that_loops_or_grows_is_ended(opened, text):
    template = opened(text, limit_s=1.0)
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(TemplateError):
            template.render(MESSAGES, SPECIAL)
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("times", [3 * 10**6, 2 * 10**7, 5 * 10**7])
def test_one_that_writes_without_end_is_refused(opened, times):
    """The operator of a run chooses its template, and everybody who serves the run fills it in."""
    template = opened("{{ messages[0].role * (messages[0].content | int) if messages }}")
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": str(times)}], SPECIAL)
    assert template.render([{"role": "user", "content": "2"}], SPECIAL) == "useruser"


def test_it_goes_on_after_a_refusal(opened):
    text = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}well"
    template = opened(text)
    with pytest.raises(TemplateError, match="no tools"):
        template.render([{"role": "tool", "content": ""}], SPECIAL)
    assert template.render(MESSAGES, SPECIAL) == "well"


@pytest.mark.parametrize(
    ("text", "words"),
    [("{% for m in messages %}", "endfor"), ("{{ 7 ** 282475249 }}", "it takes more than 1 s")],
    ids=["broken", "slow to read"],
)
def test_what_is_no_template_is_refused(text, words):
    with pytest.raises(ConfigurationError, match=f"the chat template cannot be used: .*{words}"):
        ChatTemplate(text, limit_s=1.0)
