"""Running `dipaco-simulate` inside a test."""

from __future__ import annotations

import json

import pytest

from dipaco.simulator import cli


def simulate(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert cli.main([*map(str, arguments), "--json", "--threads", "1"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
