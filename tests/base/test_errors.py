"""What a user reads when something is wrong, with real commands: one line, an exit code, no harm.

Where each item of the list "one clear line and a documented exit code, and changes nothing" is
held:

    unreachable address         here; test_diagnosis (why, of each address)
    several runs, no --run      here
    malformed multiaddr         test_command_line
    wrong run id                here
    manifest, bad signature     here (serve); test_manifest, test_directory (from the DHT)
    blob with a wrong hash      here; test_transfer, test_blobs
    truncated state transfer    test_transfer, test_state
    clock 30 s off              here, with a clock 2 s off beside it; test_clock
    port in use                 here
    disk full                   here, on a small tmpfs; test_saved_states
    unreadable corpus           test_corpus
    empty shard                 here (peer); test_prepare (prepare)
    record of a wrong type      test_records, test_directory, test_hostile_records
    forged owner of a record    test_records, test_directory, test_hostile_records
    another protocol version    here
    NaN in an outer gradient    test_contributions, test_outer
    wrong RUN.toml field        test_prepare
    Ctrl+C, twice               here

One bootstrap node serves all tests; nothing that fails here may leave a trace in its swarm.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dipaco.base.files import canonical_json
from dipaco.peer import training_peer
from dipaco.protocol.manifest import verify_manifest
from dipaco.protocol.plan import PROTOCOL_VERSION, ShardIndex
from dipaco.routing.run_folder import RunFolder
from support.programs.processes import is_running
from support.runs.tiny_run import make_tiny_run, sign_tiny_run
from support.swarms.swarm import BIN, ENVIRONMENT, LOOPBACK, Member, Swarm
from support.swarms.swarm import command as run_command
from support.waiting import wait_until

NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
# A warning that says what was refused, and from whom, may stand before the error.
WARNING = re.compile(r"\d\d:\d\d:\d\d WARN(ING)? .*")
# Of every wait; none takes so long on any machine.
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """The one swarm, and a folder for caches."""
    folder = tmp_path_factory.mktemp("errors")
    run = make_tiny_run(folder / "run", name="sound", start_s=time.time(), duration_s=3600.0,
                        inner_steps=0)  # fmt: skip
    with Swarm(folder, run) as swarm:
        yield SimpleNamespace(swarm=swarm, bootstrap=swarm.start_bootstrap(), run=run, folder=folder)


class Command:
    """A command under way, so that several can wait for the network at once."""

    def __init__(self, *words, prefix=()):
        program = str(BIN / words[0]) if words[0].startswith("dipaco-") else words[0]
        self.popen = subprocess.Popen(
            [*prefix, program, *words[1:]],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def fails(self, code, *patterns, warnings=False):
        """Check that it ends with `code` and one line of stderr that matches all `patterns`."""
        try:
            stdout, stderr = self.popen.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            stdout, stderr = self.popen.communicate()
            pytest.fail(f"it does not end\n{stdout}\n{stderr}")
        said = f"\n--- {self.popen.returncode}\n{stdout}\n---\n{stderr}"
        lines = stderr.splitlines()
        if warnings:
            lines = [line for line in lines if not WARNING.fullmatch(line)]
        assert self.popen.returncode == code, said
        assert len(lines) == 1, said
        assert lines[0].startswith("error: "), said
        assert "Traceback" not in stdout, said
        for pattern in patterns:
            assert re.search(pattern, lines[0]), f"no /{pattern}/ in{said}"

    def says(self, *patterns):
        """Wait for a line of stdout that matches all `patterns`; end it, and return the line."""
        limit = threading.Timer(LIMIT_S, self.popen.kill)
        limit.start()
        said = []
        try:
            for line in self.popen.stdout:
                said.append(line)
                if all(re.search(pattern, line) for pattern in patterns):
                    return line
            pytest.fail(f"no /{patterns}/ in\n{''.join(said)}")
        finally:
            limit.cancel()
            os.killpg(self.popen.pid, signal.SIGINT)
            self.popen.communicate(timeout=LIMIT_S)


def peer(address, cache, *extra):
    """Return the command line of a peer on loopback."""
    return (
        "dipaco-peer", "--initial-peers", address, "--host-maddrs", LOOPBACK, "--threads", "1",
        "--cache-dir", str(cache), *extra,
    )  # fmt: skip


def with_clock(shift_s, command, also="pass"):
    """Return `command` on a machine whose clock is `shift_s` ahead; `also` runs first."""
    program = (
        "import sys, time; clock = time.time; "
        f"time.time = lambda: clock() + {shift_s}; {also}; "
        "from dipaco.peer.peer_command import main; sys.exit(main(sys.argv[1:]))"
    )
    return (sys.executable, "-c", program, *command[1:])


def content(folder):
    """Return all files of a folder but locks, which are empty."""
    files = (f for f in folder.rglob("*") if f.is_file() and not f.name.endswith("lock"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def children(parent):
    """Return all processes that descend from one."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    family = {parent}
    for _ in range(5):
        family |= {pid for pid, above in pairs if above in family}
    return sorted(family - {parent})


# -- without a swarm


def test_an_unreachable_address(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}/p2p/{NOBODY}"
        commands = [
            Command(*peer(address, tmp_path / "cache")),
            Command("dipaco-status", "--initial-peers", address, "--json"),
            Command("dipaco-generate", "--initial-peers", address, "Once"),
        ]
        for command in commands:
            command.fails(2, re.escape(address), "refused|answered", "check|ask anybody in it")


def test_a_port_in_use(tmp_path):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        where = f"/ip4/127.0.0.1/tcp/{port}"
        run = make_tiny_run(tmp_path / "run")
        before = content(run.path)
        commands = [
            Command("dipaco-bootstrap", "serve", str(run.path), "--host-maddrs", where),
            Command("dipaco-peer", "--initial-peers", f"{where}/p2p/{NOBODY}", "--port", str(port),
                    "--cache-dir", str(tmp_path / "cache")),
        ]  # fmt: skip
        for command in commands:
            command.fails(4, f"/tcp/{port}", "in use", "--port")
    assert {name: data for name, data in content(run.path).items() if name in before} == before


def test_a_manifest_that_was_changed(tmp_path):
    run = make_tiny_run(tmp_path / "run")
    text = run.manifest_path.read_text()
    run.manifest_path.write_text(text.replace('"learning_rate": 0.003', '"learning_rate": 0.3'))
    before = content(run.path)
    command = Command("dipaco-bootstrap", "serve", str(run.path), "--host-maddrs", LOOPBACK)
    command.fails(6, "signature of run 'tiny'", "is wrong", "ask the operator")
    assert {name: data for name, data in content(run.path).items() if name in before} == before


def test_ctrl_c_while_joining_ends_at_once(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{NOBODY}"
        command = Command(*peer(address, tmp_path / "cache"))
        silent.settimeout(LIMIT_S)
        dialled, _ = silent.accept()
        family = children(command.popen.pid)
        assert family
        command.popen.send_signal(signal.SIGINT)
        stdout, stderr = command.popen.communicate(timeout=LIMIT_S)
        dialled.close()
    assert (command.popen.returncode, stderr) == (130, "")
    assert "stopped before the swarm was joined" in stdout
    wait_until(lambda: not any(map(is_running, family)))


@pytest.mark.parametrize("is_joined", [True, False])
def test_leaving_has_ten_seconds_whatever_hangs(monkeypatch, is_joined):
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    timers = []

    def timer(seconds, then):
        timers.append((seconds, then))
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(training_peer.threading, "Timer", timer)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    stopping = threading.Event()
    try:
        joined = training_peer.install_stop_signals(stopping, lambda line: None)
        if is_joined:
            joined.set()
        with contextlib.nullcontext() if is_joined else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert stopping.is_set()
    limit_s = training_peer.LEAVE_LIMIT_S if is_joined else training_peer.GIVE_UP_LIMIT_S
    assert timers == [(limit_s, training_peer._exit_at_once)]
    assert limit_s < 10.0


# -- with the swarm


def test_a_run_that_is_not_there(tmp_path, scene):
    address, run_id = scene.bootstrap.address(), scene.run.plan().run_id
    listed = f"{run_id} 'sound'"
    commands = [
        Command(*peer(address, tmp_path / "cache", "--run", "0000000000000000")),
        Command("dipaco-status", "--initial-peers", address, "--run", "sund"),
    ]
    commands[0].fails(5, "--run 0000000000000000 matches no run", listed)
    commands[1].fails(5, "--run sund matches no run", listed)


def test_a_clock_that_is_wrong(tmp_path, scene):
    address = scene.bootstrap.address()
    ahead = Command(*with_clock(30, peer(address, tmp_path / "ahead")))
    behind = Command(*with_clock(-30, peer(address, tmp_path / "behind")))
    ahead.fails(8, r"(29|30|31)\.\d s ahead", "timedatectl set-ntp true")
    behind.fails(8, r"(29|30|31)\.\d s behind", "timedatectl set-ntp true")


def test_a_clock_somewhat_wrong_is_corrected_and_ctrl_c_twice_exits_at_once(scene):
    command = peer(scene.bootstrap.address(), scene.folder / "two-seconds")
    # Leaving does not end by itself.
    hangs = (
        "import dipaco.peer.training_peer as app, dipaco.peer.node.node as node; app.LEAVE_LIMIT_S = 1000; "
        "node.Node.close = lambda self: time.sleep(1000)"
    )
    member = Member("two-seconds", scene.folder, list(with_clock(2, command, hangs)))
    scene.swarm.members.append(member)
    scene.swarm.wait([member], "inner", timeout_s=LIMIT_S)
    assert re.search(r"clock: -\d\.\d\d s against the swarm, corrected", member.output.read_text())
    family = children(member.popen.pid)
    assert len(family) >= 3
    member.interrupt()
    wait_until(lambda: "press Ctrl+C again" in member.output.read_text(), LIMIT_S)
    member.interrupt()
    assert member.popen.wait(LIMIT_S) == 130
    assert "Traceback" not in member.output.read_text()
    wait_until(lambda: not any(map(is_running, family)))


def test_a_full_disk(tmp_path, scene):
    cache = tmp_path / "small"
    cache.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.fail(
            "this test mounts a small tmpfs in a user namespace of its own; allow it: "
            "sysctl kernel.unprivileged_userns_clone=1, or docker run --privileged"
        )
    # Room for the key, the manifest and the index, but not for the base model.
    mount = f'mount -t tmpfs -o size=512k tmpfs {cache} && exec "$@"'
    command = Command(*peer(scene.bootstrap.address(), cache), prefix=("unshare", "-rm", "sh", "-c", mount, "sh"))
    command.fails(9, "disk: .* can be used at", re.escape(str(cache)), "--cache-dir")


def test_another_version_of_the_protocol(tmp_path):
    """Somebody runs the next version; we can neither serve its run nor join it."""
    run = make_tiny_run(tmp_path / "run", name="future", start_s=time.time())
    sign_tiny_run(run, run.plan().model_copy(update={"protocol_version": PROTOCOL_VERSION + 1}))
    program = (
        "import sys, dipaco.protocol.plan as plan; plan.PROTOCOL_VERSION += 1; "
        "from dipaco.bootstrap.bootstrap_command import main; sys.exit(main(sys.argv[1:]))"
    )
    serve = ["serve", str(run.path), "--host-maddrs", LOOPBACK]
    said = f"'future' speaks protocol {PROTOCOL_VERSION + 1}"
    Command("dipaco-bootstrap", *serve).fails(11, said, "install")
    with Swarm(tmp_path, run) as swarm:
        node = swarm._add("future", [sys.executable, "-c", program, *serve])
        command = Command(*peer(node.address(), tmp_path / "cache"))
        command.fails(11, said, "install")
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


# -- two runs in one DHT, one of them with broken files; last, so that the others see one run


@pytest.fixture(scope="module")
def broken(scene):
    """A second run in the same DHT: the shard of path 0 is damaged, that of path 1 empty."""
    run = make_tiny_run(scene.folder / "broken", name="broken", seed=1, start_s=time.time())
    plan = run.plan()
    paths = list(run.shard_index(plan).paths)
    paths[1] = paths[1].model_copy(
        update={"train_sequences": 0, "train_documents": 0, "train_sha256": run.blobs.add_bytes(b"")}
    )
    index = ShardIndex(sequence_length=plan.model.sequence_length, paths=tuple(paths))
    shards = run.blobs.add_bytes(canonical_json(index.model_dump(mode="json")))
    sign_tiny_run(run, plan.model_copy(
        update={"blobs": plan.blobs.model_copy(update={"shards": shards})}
    ))  # fmt: skip
    file = run.blobs.path(paths[0].train_sha256)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    member = scene.swarm._add(
        "broken-bootstrap",
        [str(BIN / "dipaco-bootstrap"), "serve", str(run.path), "--host-maddrs", LOOPBACK,
         "--initial-peers", scene.bootstrap.address()],
    )  # fmt: skip
    scene.swarm.wait([member], "serving", timeout_s=LIMIT_S)
    return member


def status(scene, *flags):
    """Ask for the status of the swarm, to the end."""
    address = scene.bootstrap.address()
    return run_command("dipaco-status", "--initial-peers", address, *flags, timeout_s=LIMIT_S)


def test_several_runs_and_no_choice(tmp_path, scene, broken):
    address = scene.bootstrap.address()
    wanted = ("several runs", "'broken'", "'sound'", "--run ID")
    # One address alone means the run that is there. A node tells of its run a moment after it serves it.
    both = ("--initial-peers", address, "--initial-peers", broken.address())
    wait_until(lambda: run_command("dipaco-status", *both, timeout_s=LIMIT_S).returncode == 5, LIMIT_S)
    Command("dipaco-eval", *both, "--data", __file__).fails(5, *wanted)
    Command(*peer(address, tmp_path / "cache", "--path", "99")).fails(3, "paths 0 to 3")
    assert (tmp_path / "cache" / scene.run.plan().run_id).is_dir()


def test_an_address_that_names_the_operator(tmp_path, scene, broken):
    address = scene.bootstrap.address()
    operator = verify_manifest(scene.run.manifest_path.read_bytes()).operator_fingerprint
    pinned = Command("dipaco-status", "--initial-peers", f"{address}/operator/{operator}", "--json")
    output, _ = pinned.popen.communicate(timeout=LIMIT_S)
    assert json.loads(output)["run"]["name"] == "sound"
    wrong = f"{address}/operator/{'0' * 16}"
    command = Command(*peer(wrong, tmp_path / "cache"))
    command.fails(6, f"pins operator {'0' * 16}", "is signed by")


def test_a_blob_that_is_not_what_it_should_be(tmp_path, scene, broken):
    cache = tmp_path / "cache"
    command = Command(*peer(broken.address(), cache, "--run", "broken", "--path", "0"))
    # Another holder may have the true one, so it tries on for a while, and says what it is about.
    command.says("waiting for the shard of path 0", broken.peer_id, "hash", "at most")
    wrong = RunFolder(scene.folder / "broken")
    sha256 = wrong.shard_index(wrong.plan()).paths[0].train_sha256
    assert not [name for name in content(cache) if sha256 in name], "nothing of it is kept"


def test_an_empty_shard(tmp_path, broken):
    command = Command(*peer(broken.address(), tmp_path / "cache", "--run", "broken", "--path", "1"))
    command.fails(10, "path 1 has an empty shard", "balanced = true")


def test_nothing_of_all_this_changed_the_swarm(scene):
    done = status(scene, "--run", "sound", "--json")
    # The claim of a peer that was stopped twice may still stand, so it may say healthy or not.
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    shown = json.loads(done.stdout)
    # That peer trained, too, and its work may be in a step made before it left.
    grid = scene.run.grid(scene.run.plan())
    paths = {e["path"] for m in scene.swarm.members for e in m.of("claimed")}
    trained = {module for path in paths for module in grid.modules_of_path(path)}
    assert len(paths) <= 1
    assert {p["path"] for p in shown["paths"] if p["last_round"] is not None} <= paths
    assert {m["module"] for m in shown["modules"] if m["version"]} <= trained
    assert {m for m in grid.modules() if scene.run.states.digests(m)} <= trained
