"""The log of events, which other programs read."""

import json

from dipaco.peer.reporting.event_log import EventLog


def test_a_number_that_is_none_is_null_and_every_line_is_json(tmp_path):
    """jq, browsers and most libraries refuse a line with NaN in it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    heard = []
    log = EventLog(tmp_path / "events.json")
    log.add_listener(lambda kind, values: heard.append(values))
    log.emit("inner", loss=float("nan"), tokens=3)
    log.emit("round", loss=float("-inf"), digests={"L0.E0": [1.5, float("inf")]}, paths=(1, 2))
    log.close()
    lines = (tmp_path / "events.json").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (first["loss"], first["tokens"]) == (None, 3)
    assert (second["loss"], second["digests"], second["paths"]) == (None, {"L0.E0": [1.5, None]}, [1, 2])
    assert heard[0]["loss"] != heard[0]["loss"], "who listens here has the number itself"
