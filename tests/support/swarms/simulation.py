"""Running `dipaco-simulate` inside a test."""

import json

from dipaco.simulator import simulate_command


def simulate(capsys, *arguments):
    assert simulate_command.main([*map(str, arguments), "--json", "--threads", "1"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
