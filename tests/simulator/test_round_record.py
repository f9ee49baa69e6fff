"""The file of a simulation's rounds, of which a machine without power may leave a part."""

import json

import pytest

from dipaco.simulator.round_record import RoundRecord
from dipaco.simulator.round_report import RoundReport
from support.programs.power_cut import CUTS, cut


def report(round_index):
    return RoundReport(round_index, {}, {}, (), tokens=0, bytes=0, seconds=0.0)


@pytest.mark.parametrize("how", CUTS)
def test_a_log_that_was_cut_off_goes_on_behind_its_last_whole_round(tmp_path, how):
    log = tmp_path / "rounds.jsonl"
    record = RoundRecord(log)
    for round_index in range(3):
        record.add(report(round_index))
    cut(log, how)
    RoundRecord(log, goes_on=True).add(report(9))
    rounds = [json.loads(line)["round"] for line in log.read_text().splitlines()]
    assert rounds[-1] == 9
    assert rounds[:-1] == list(range(len(rounds) - 1))
    if how == CUTS[-1]:
        assert len(rounds) == 4
