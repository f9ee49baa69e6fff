"""What bounds an answer is the time of a processor, not how busy the machine is."""

from pathlib import Path

import pytest

from dipaco.base.bounded_process import BoundedProcess, OverBoundError

TESTS = Path(__file__).parents[1]


def test_a_process_is_ended_for_what_it_computes_and_not_for_what_it_waits(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    process = BoundedProcess("support.programs.slow_answers", {}, limit_s=0.5, first_s=5.0)
    try:
        # As long as a machine that gives it a third of a processor.
        assert process.ask(["wait", 1.5]) == "wait"
        with pytest.raises(OverBoundError, match="more than 0.5 s"):
            process.ask(["compute", 60.0])
        # The next question starts another one, and what was computed before counts for nothing.
        assert [process.ask(["compute", 0.2]) for _ in range(4)] == ["compute"] * 4
    finally:
        process.close()
