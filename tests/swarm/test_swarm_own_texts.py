"""Promise 13 with real processes: two owners train on texts of theirs, and nothing of these leaves their caches.

Every text has a marker. It is looked for in every byte that a peer hands to a socket, and in every file but the
rows of the texts: as a text, as JSON has it, and as token ids in the forms that have room for one.
"""

import json
import stat
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support.runs.tiny_run import make_tiny_run, sign_tiny_run, tiny_documents
from support.swarms.swarm import LIMIT_S, Swarm, command

DOCUMENTS = 40
MARKERS = ("Quetzal wyvern 4711-Ümlaut", "Xylograph zephyr 0815-Ñandú")
TESTS = str(Path(__file__).parents[1])


def needles(run, marker):
    """Return the bytes by which a marker is found."""
    tokenizer = run.tokenizer(run.plan())
    ids = [int(one) for one in tokenizer.document_tokens(f"a {marker} a")]
    # What stands around it may be merged with its ends.
    ids = np.array(ids[4:-4])
    assert len(ids) >= 8
    forms = [ids.astype(kind).tobytes() for kind in ("<u2", ">u2", "<u4", ">u4", "<i8", ">i8")]
    listed = json.dumps(ids.tolist())[1:-1]
    texts = [marker, json.dumps(marker)[1:-1], marker.partition(" ")[0], listed, listed.replace(" ", "")]
    return [*forms, *(text.encode() for text in texts)]


def found_in(folder, needles):
    """Return which files below a folder have a needle in them."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            found[file] = [needle for needle in needles if needle in data]
    return {str(file.relative_to(folder)) for file, what in found.items() if what}


class Owners:
    """Two peers with texts, in folders of their own."""

    def __init__(self, folder, run):
        self.folder, self.run, self.texts = folder, run, folder / "texts"
        self.sent = folder / "sent"
        for one in (self.texts, self.sent):
            one.mkdir()
        documents = tiny_documents(2, DOCUMENTS, seed=5)
        for number, marker in enumerate(MARKERS):
            own = documents[number * DOCUMENTS : (number + 1) * DOCUMENTS]
            rows = [json.dumps({"body": f"{text} {marker} {text}"}, ensure_ascii=False) for text in own]
            (self.texts / f"{number}.jsonl").write_text("\n".join(rows))

    def start(self, swarm, address, number, *extra):
        home = self.folder / f"home{number}"
        for one in (home, home / "tmp", self.sent / str(number)):
            one.mkdir(exist_ok=True)
        folders = (f"HOME={home}", f"TMPDIR={home / 'tmp'}", f"PYTHONPATH={TESTS}")
        program = (sys.executable, "-m", "support.programs.recorded_peer", str(self.sent / str(number)))
        return swarm.start_peer(
            address, "--texts", str(self.texts / f"{number}.jsonl"), "--text-field", "body", "--debug", *extra,
            name=f"owner{number}", program=("env", *folders, *program),
        )  # fmt: skip


def places(peer):
    (file,) = peer.cache.glob("own-texts/*/places.json")
    return {path: place["batches"] for path, place in json.loads(file.read_text()).items()}


def steps_of_both(swarm, peers, since_s=0.0):
    """Wait until both are in two steps of the module that they share, and have scored their texts."""
    ids = {peer.peer_id for peer in peers}
    for _ in range(2):

        def is_of_both(event, since_s=since_s):
            return event["time_s"] > since_s and set(event["group"]) == ids and event["module"] == "L0.E0"

        events = swarm.wait(peers, "outer_step", is_of_both)
        since_s = max(event["time_s"] for event in events)
    swarm.wait(peers, "own_texts_validation", lambda e: e["time_s"] > since_s)


@pytest.mark.timeout(900)
def test_nothing_of_own_texts_leaves_the_cache_of_their_owner(tmp_path):
    run = make_tiny_run(
        tmp_path / "run", modules_per_level=(1, 2), inner_steps=0, duration_s=6.0, rounds={"validation_sequences": 4}
    )
    sign_tiny_run(run, run.plan().model_copy(update={"own_texts": "yes", "start_s": time.time()}))
    owners = Owners(tmp_path, run)
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        address = bootstrap.address()
        peers = [owners.start(swarm, address, 0, "--only-my-texts", "--metrics", "0"), owners.start(swarm, address, 1)]
        steps_of_both(swarm, peers)
        assert [peer.of("own_texts")[0]["path"] for peer in peers] == [0, 1]
        for number, peer in enumerate(peers):
            said = peer.output.read_text()
            assert f"trains path {number} on " in said
            assert "(their text stays here; others see what the model learns from them)" in said

        # Both read with records that are a refresh old at most.
        deadline = time.monotonic() + LIMIT_S
        while True:
            shown = command("dipaco-status", address, "--json").stdout
            status = json.loads(shown)
            losses = {one["peer_id"]: one["own_texts_loss"] for one in status["peers"]}
            if all(losses.get(peer.peer_id) for peer in peers):
                break
            assert time.monotonic() < deadline, status["peers"]
            time.sleep(1.0)
        (tmp_path / "status.json").write_text(shown)

        # The first goes on where it was, with the rows that it has.
        peers[0].interrupt()
        assert peers[0].popen.wait(LIMIT_S) == 0, swarm.outputs()
        before, (made,) = places(peers[0]), peers[0].cache.glob("own-texts/*/made.json")
        assert before["0"] > 0
        made_ns, stopped_s = made.stat().st_mtime_ns, time.time()
        peers[0] = owners.start(swarm, address, 0)
        steps_of_both(swarm, peers, stopped_s)
        for peer in peers:
            peer.interrupt()
            assert peer.popen.wait(LIMIT_S) == 0, swarm.outputs()
        assert places(peers[0])["0"] > before["0"]
        assert made.stat().st_mtime_ns == made_ns

    wanted = [needle for marker in MARKERS for needle in needles(run, marker)]
    # The needles are those that there would be.
    rows = {str(file.relative_to(tmp_path)) for file in tmp_path.glob("owner*-cache/own-texts/*/rows/*")}
    found = found_in(tmp_path, wanted)
    assert {f"texts/{n}.jsonl" for n in range(2)} <= found
    assert {file.partition("/")[0] for file in found & rows} == {"owner0-cache", "owner1-cache"}
    assert found - rows == {f"texts/{n}.jsonl" for n in range(2)}
    for number in range(2):
        recorded = [*(tmp_path / "sent" / str(number)).iterdir()]
        assert len(recorded) >= 2, "the training process and the DHT process"
        sent = b"".join(file.read_bytes() for file in recorded)
        assert run.plan().run_id.encode() in sent, "what is sent is recorded in plain"
        assert b"own_texts_loss" in sent
        for file in (tmp_path / f"owner{number}-cache" / "own-texts").rglob("*"):
            assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600)

    forgotten = command("dipaco-peer", "--forget-texts", "--cache-dir", str(peers[0].cache))
    assert "stays in the model" in forgotten.stdout
    assert not (peers[0].cache / "own-texts").exists()
