"""What a run is for: in the operator's words, which come from outside."""

import pytest
from pydantic import ValidationError

from dipaco.inference.export.model_card import escaped
from dipaco.protocol.about import AboutRun


def test_what_is_said_is_one_line():
    assert AboutRun().text == ""
    assert AboutRun(description="Laws of nine countries.").text == "Laws of nine countries."
    about = AboutRun(description="Laws.", language="German", licence="CC-BY-4.0", end="2026-12-31")
    assert about.text == "Laws. (language German; licence of the model CC-BY-4.0; planned until 2026-12-31)"
    assert AboutRun(language="de").text == "language de"


@pytest.mark.parametrize(
    "said",
    [
        {"description": "two\nlines"},
        {"description": "\x1b[2J"},
        {"description": "turned \u202e round"},
        {"description": "x" * 401},
        {"licence": " spaces around "},
        {"language": "x" * 61},
        {"end": "next year"},
        {"end": "2026-02-30"},
        {"budget": "1 EUR"},
    ],
)
def test_what_commands_a_terminal_or_has_no_end_is_refused(said):
    with pytest.raises(ValidationError):
        AboutRun(**said)


def test_a_card_shows_it_as_it_is():
    assert escaped("<b>bold</b> [x](y) 5 * 3, CC-BY-4.0.") == r"\<b\>bold\</b\> \[x\]\(y\) 5 \* 3, CC\-BY\-4.0."
