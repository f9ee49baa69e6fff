"""Progress of long things: a line now and then, with an estimate; nothing of what is quick."""

import io

from rich.console import Console

from dipaco.base.progress import LINE_EVERY_S, StageProgress, bar_or_lines, each, seldom
from support.waiting import HandClock


def test_lines_come_seldom_and_say_how_long_it_goes_on():
    clock, said = HandClock(), []
    stage = StageProgress("fetching", said.append, now=clock)
    stage.update(40, 100)
    clock.s += LINE_EVERY_S - 1
    stage.update(45, 100)
    assert said == []
    clock.s += 1
    stage.update(60, 100, "(a note)")
    stage.update(61, 100)
    # What was there at the beginning does not count: 20 in 10 s.
    assert said == ["fetching: 60 of 100 (a note), about 20 s more"]
    clock.s += LINE_EVERY_S
    stage.update(61, None)
    assert said[1:] == ["fetching: 61"]


def test_each_says_which_of_how_many_and_how_long_it_goes_on():
    clock, said = HandClock(), []
    for _ in each("abc", said.append, lambda item: f"does {item}", now=clock):
        clock.s += 300
    assert said == ["does a (1 of 3)", "does b (2 of 3, about 10 min more)", "does c (3 of 3, about 5 min more)"]


def test_where_nobody_watches_what_is_quick_says_nothing():
    clock, said = HandClock(), []
    say = seldom(said.append, now=clock)
    say("one")
    clock.s += LINE_EVERY_S
    say("two")
    say("three")
    assert said == ["two"]


def test_a_bar_on_a_terminal_and_nothing_quick_elsewhere():
    for is_terminal in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=is_terminal, width=80)
        with bar_or_lines("[name]", console) as stage:
            stage.update(1, 2)
        assert ("[name]" in file.getvalue()) == is_terminal
        assert ("1 of 2" in file.getvalue()) == is_terminal
