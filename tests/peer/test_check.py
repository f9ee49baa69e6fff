"""`dipaco-peer --check`: what it looks at, what it says of it, and which remedy it names."""

from dataclasses import replace

import pytest
import torch

from dipaco.base.errors import ClockError, ConfigurationError, StorageError, UnreachableError
from dipaco.modules.layout import layout_of
from dipaco.modules.memory import head_bytes
from dipaco.modules.transformer import LOGITS_AT_ONCE_ON_GPU
from dipaco.peer.check import checks, doctor, fits, needs, this_machine
from dipaco.peer.check.fits import MemoryNeed
from dipaco.peer.check.this_machine import Gpu, Memory
from dipaco.peer.node.guests import admit
from dipaco.peer.peer_settings import PeerSettings
from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import KEY_FILE, load_or_create_identity
from dipaco.protocol.invitations import Terms, make_invitation
from dipaco.protocol.manifest import sign_manifest, verify_manifest
from support.runs.make_plan import make_plan
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import Swarm, command
from support.wire.peers import key

GIB = 2**30
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"


def machine_root(folder, files):
    """Make up the files of a machine."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def remedy(check, verdict, exit_code=None):
    assert (check.verdict, check.error and check.error.exit_code) == (verdict, exit_code), check
    assert check.value
    return check.remedy


@pytest.fixture
def settings(tmp_path):
    return PeerSettings(initial_peers=(ADDRESS,), device="cpu", cache_folder=tmp_path / "cache")


# -- the machine


def test_the_first_windows_subsystem_is_refused(tmp_path):
    def check(name, version, **files):
        return this_machine.check_system(machine_root(tmp_path / name, {"proc/version": version, **files}))

    release = {"etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n'}
    two = check("two", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)", **release)
    assert (two.verdict, two.value) == ("ok", "Ubuntu 24.04 LTS, Linux 5.15.153.1-microsoft-standard-WSL2")
    one = check("one", "Linux version 4.4.0-19041-Microsoft (Microsoft@x)")
    assert "--set-version" in remedy(one, "problem", 3)


def test_a_peer_has_as_many_files_as_it_may(monkeypatch):
    limits, most = [], this_machine.OPEN_FILES
    monkeypatch.setattr(this_machine.resource, "setrlimit", lambda kind, wanted: limits.append(wanted))
    for soft, hard in ((1024, 4096), (1024, 10**6), (10**5, 10**6), (1024, -1)):
        monkeypatch.setattr(this_machine.resource, "getrlimit", lambda kind, soft=soft, hard=hard: (soft, hard))
        this_machine.open_many_files()
    assert limits == [(4096, 4096), (most, 10**6), (most, -1)]


MEMORY = {"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"}


@pytest.mark.parametrize(
    ("group", "mount", "limit", "used", "unlimited"),
    [
        ("0::{}\n", "sys/fs/cgroup", "memory.max", "memory.current", "max"),
        (
            "4:cpu,memory:{}\n0::/elsewhere\n",
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "9223372036854771712",
        ),
    ],
)
def test_the_least_limit_of_the_own_control_group_is_the_memory(tmp_path, group, mount, limit, used, unlimited):
    """Also that of a job or a unit, which stands below the root of the mount."""

    def memory(name, path, **limits):
        files = {**MEMORY, "proc/self/cgroup": group.format(path)}
        for place, (most, now) in limits.items():
            folder = f"{mount}/{'' if place == 'root' else 'job/' if place == 'job' else 'job/step/'}"
            files |= {f"{folder}{limit}": f"{most}\n", f"{folder}{used}": f"{now}\n"}
        return this_machine.look_at_memory(machine_root(tmp_path / name, files))

    everything = Memory(16 * GIB, 8 * GIB)
    assert memory("none", "/") == everything
    assert memory("unlimited", "/job", root=(unlimited, GIB), job=(unlimited, GIB)) == everything
    # A container whose group is called by the host's name sees its own at the root.
    assert memory("container", "/docker/0123", root=(4 * GIB, GIB)) == Memory(4 * GIB, 3 * GIB)
    assert memory("unit", "/job", root=(unlimited, GIB), job=(2 * GIB, GIB)) == Memory(2 * GIB, GIB)
    nested = memory("nested", "/job/step", root=(8 * GIB, GIB), job=(2 * GIB, GIB), step=(3 * GIB, GIB // 2))
    assert nested == Memory(2 * GIB, GIB)


@pytest.mark.parametrize(
    ("file", "maker"), [("dev/nvidia0", "NVIDIA"), ("dev/kfd", "AMD"), ("usr/lib/wsl/lib/libcuda.so.1", "NVIDIA")]
)
def test_gpus_that_pytorch_may_not_see(file, maker, tmp_path):
    assert this_machine.look_for_gpu_hardware(tmp_path) == ""
    assert this_machine.look_for_gpu_hardware(machine_root(tmp_path, {file: ""})) == maker


@pytest.mark.parametrize(
    ("maker", "built_for", "said"),
    [
        ("NVIDIA", None, "pip install --force-reinstall torch==2.9.1; then nvidia-smi"),
        ("NVIDIA", "cuda", "type nvidia-smi"),
        ("AMD", "cuda", "pytorch.org"),
        ("AMD", "hip", "type rocm-smi"),
    ],
)
def test_how_a_gpu_comes_to_be_used(maker, built_for, said, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, "12.8" if built_for == name else None)
    assert said in this_machine.how_to_use_gpu(maker)
    monkeypatch.setattr(fits, "look_for_gpu_hardware", lambda: maker)
    unused = fits.check_device(None, "auto", "cuda:0: no kernels")
    assert said in remedy(unused, "warning")
    assert f"THIS MACHINE HAS AN {maker} GPU" in unused.value
    assert "no kernels" in unused.value
    assert fits.check_device(None, "cpu", "asked for").verdict == "ok"


# -- the machine and the run


def test_devices():
    gpu = Gpu("RTX 3060", 11 * GIB, 12 * GIB, "bf16")
    assert "bf16 (it is there)" in fits.check_device(gpu, "auto", "it is there").value
    assert "scaled" in fits.check_device(replace(gpu, number_format="fp16"), "auto", "").remedy
    assert "half the speed" in fits.check_device(replace(gpu, number_format="fp32"), "auto", "").remedy


def test_disks(tmp_path, settings, monkeypatch):
    plan = make_tiny_run(tmp_path / "run").plan()
    shards = make_tiny_run(tmp_path / "run").shard_index(plan)
    takes = {"own states": 2 * 10**9, "contributions": 10**9}
    monkeypatch.setattr(needs, "disk_bytes", lambda *_: takes)

    def check(spare, limit_gb=None, mounts="a / ext4 rw\n", plan=plan):
        monkeypatch.setattr(fits, "spare_bytes", lambda folder: spare)
        root = machine_root(tmp_path / "root", {"proc/mounts": mounts})
        return fits.check_disk(replace(settings, max_disk_gb=limit_gb), plan, shards, None, root)

    assert check(0, plan=None).verdict == "ok"
    assert check(4 * 10**9).verdict == "ok"
    assert "--cache-dir" in remedy(check(2 * 10**9), "problem", 9)
    limited = check(9 * 10**9, limit_gb=2)
    assert "--max-disk-gb 3 " in remedy(limited, "problem", 9)
    assert limited.value.startswith("2 GB may be used")
    assert "home folder of Linux" in remedy(check(4 * 10**9, mounts=f"C: {tmp_path} 9p rw\n"), "warning")
    assert remedy(check(4 * 10**9, mounts=f"x {tmp_path} tmpfs rw\n"), "warning")
    kept = settings.cache_folder / plan.run_id / "state"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(1000))
    assert check(3 * 10**9 - 1000).verdict == "ok"
    limited = replace(settings, max_disk_gb=4)
    assert fits.contributions_limit(limited, plan, shards) == 2 * 10**9
    settings.cache_folder.joinpath("file").touch()
    nowhere = replace(settings, cache_folder=settings.cache_folder / "file" / "below")
    assert remedy(fits.check_disk(nowhere, None, None), "problem", 9)


NEED = MemoryNeed(
    path_parameters=150_000_000,
    fixed_bytes=2 * GIB,
    pass_bytes=GIB,
    least_pass_bytes=GIB // 4,
    main_bytes=3 * GIB,
    batch=8,
)


def test_memory_of_a_gpu():
    gpu = Gpu("RTX 3060", 10 * GIB, 12 * GIB, "bf16")
    enough = fits.check_gpu_memory(NEED, gpu)
    assert enough.verdict == "ok"
    assert enough.value.endswith("; 7 fit")
    twice = fits.check_gpu_memory(NEED, replace(gpu, free_bytes=3 * GIB))
    assert "close other programs" in remedy(twice, "warning")
    assert "computed twice" in twice.value
    small = replace(gpu, free_bytes=int(2.4 * GIB))
    assert "adamw8bit" in remedy(fits.check_gpu_memory(NEED, small), "problem", 3)


def test_main_memory():
    def check(available, *, on_cpu):
        return fits.check_main_memory(NEED, Memory(32 * GIB, int(available)), on_cpu=on_cpu)

    assert check(4 * GIB, on_cpu=False).verdict == "ok"
    assert "container" in remedy(check(2 * GIB, on_cpu=False), "problem", 3)
    # On the CPU all of it is main memory: 2 + 8 + 3 GiB with the whole batch at once.
    assert check(14 * GIB, on_cpu=True).verdict == "ok"
    fewer = check(10.5 * GIB, on_cpu=True)
    assert (fewer.verdict, fewer.value[-24:]) == ("ok", "with 5 sequences at once")
    assert "adamw8bit" in remedy(check(4 * GIB, on_cpu=True), "problem", 3)


def test_a_run_s_needs(tmp_path, settings):
    plan = make_tiny_run(tmp_path / "run", inner={"optimizer": "adamw"}).plan()
    need = fits.memory_need(plan, settings, None)
    logits = head_bytes(plan.model, 1, LOGITS_AT_ONCE_ON_GPU)
    assert need.fixed_bytes == 16 * need.path_parameters + logits
    assert need.batch == plan.inner.batch_sequences
    on_gpu = fits.memory_need(plan, settings, Gpu("x", 1, 1, "bf16"))
    assert need.pass_bytes > on_gpu.pass_bytes - 4 * need.path_parameters
    eight = replace(settings, optimizer="adamw8bit")
    assert fits.memory_need(plan, eight, None).fixed_bytes == 10 * need.path_parameters + logits
    grid = needs.grid_of(plan)
    main = needs.main_memory_bytes(plan, grid, need.path_parameters)
    assert need.main_bytes == sum(main.values()) + fits.PROGRAMS_BYTES
    assert sum(main.values()) <= 13 * need.path_parameters


def test_nothing_is_claimed_on_a_machine_that_is_too_small(tmp_path, settings, monkeypatch):
    run = make_tiny_run(tmp_path / "run")
    plan = run.plan()
    shards = run.shard_index(plan)
    assert fits.fitting_batch(settings, plan, shards) == plan.inner.batch_sequences
    with monkeypatch.context() as patch:
        patch.setattr(needs, "disk_bytes", lambda *_: {"contributions": 3 * 10**9})
        with pytest.raises(StorageError, match="--max-disk-gb 3 "):
            fits.fitting_batch(replace(settings, max_disk_gb=2), plan, shards)
    need = fits.memory_need(plan, settings, None, 0)
    two = Memory(2**40, need.main_bytes + need.fixed_bytes + 2 * need.pass_bytes)
    monkeypatch.setattr(fits, "look_at_memory", lambda: two)
    assert fits.fitting_batch(settings, plan, shards) == 2
    monkeypatch.setattr(fits, "look_at_memory", lambda: Memory(2**40, need.main_bytes))
    with pytest.raises(ConfigurationError, match="memory: .* free, this run takes"):
        fits.fitting_batch(settings, plan, shards)


def test_a_member_receives_everybody_else_s_contributions(tmp_path):
    plan = make_tiny_run(tmp_path / "run", modules_per_level=(2, 4), codec="float32").plan()
    grid = needs.grid_of(plan)
    for level, members in (("L0", 4), ("L1", 2)):
        least = 4 * layout_of(grid, level).size * (members - 1)
        assert least <= needs.received_bytes(plan, grid, level) <= 1.05 * least + 1024
    assert needs.too_slow(plan, None) == []
    assert len(needs.too_slow(plan, 1e-6)) == 2
    assert doctor.check_line(plan, None).verdict == "ok"
    assert "--max-upload-mbps" in remedy(doctor.check_line(plan, 1e-6), "warning")
    # What carries a file to two of three others is too slow: all three fetch it at once.
    three_s = 8e-6 * needs.received_bytes(plan, grid, "L0") / plan.rounds.gather_limit_s
    assert not needs.too_slow(plan, 1.01 * three_s)
    assert needs.too_slow(plan, 0.9 * three_s)


# -- the swarm


def test_clocks():
    assert doctor.check_clock(0.02).verdict == "ok"
    late = doctor.check_clock(2.0)
    assert "timedatectl" in remedy(late, "warning")
    assert "2.0 s behind the swarm's" in late.value
    assert "ahead of" in doctor.check_clock(-2.0).value


def test_reachability():
    own = ("/ip4/172.20.1.2/tcp/31337/p2p/12D3KooWPeer",)
    assert doctor.check_reachability(own, "direct", 31337).verdict == "ok"
    assert "forward TCP port 4000" in remedy(doctor.check_reachability(own, "outgoing", 4000), "warning")
    # Where nobody tried, there may be nothing to mend.
    unknown = doctor.check_reachability(own, "unknown", 4000)
    assert not remedy(unknown, "ok")
    assert "once it has joined" in unknown.value


def test_an_invitation(tmp_path, settings):
    """Joining would end with exit code 13 without one, so the check does; it takes no place."""
    operator = key(1000)
    manifest = verify_manifest(sign_manifest(make_plan(), operator))
    scope = manifest.plan.admission_scope
    thrown_away = load_or_create_identity(tmp_path / "thrown-away" / KEY_FILE)

    def look(invitation=None, cache_folder=settings.cache_folder):
        asked = replace(settings, invitation=invitation, cache_folder=cache_folder)
        return doctor.check_invitation(asked, Gate.of(manifest), manifest, thrown_away)

    one, elsewhere, ended = (
        make_invitation(Terms(run, 1, expires_s), operator).to_text()
        for run, expires_s in ((scope, 0), ("f" * 16, 0), (scope, 1))
    )
    assert "--invitation" in remedy(look(), "problem", 13)
    for text in (elsewhere, ended, f"{one[:-4]}AAAA", one[:30]):
        assert remedy(look(text), "problem", 13)
    assert remedy(look(one), "ok") == ""
    # Of a peer that has joined before, the kept admission counts.
    mine = load_or_create_identity(tmp_path / "joined" / KEY_FILE)
    admit(Gate.of(manifest), mine, manifest, 0.0, one)
    assert "has admitted" in look(cache_folder=tmp_path / "joined").value
    mine.release()
    thrown_away.release()


def test_the_base_of_adapters():
    assert not remedy(doctor.check_base("OWNER/NAME", "1 GB", is_here=True), "ok")
    fetched = doctor.check_base("OWNER/NAME", "1 GB", is_here=False)
    assert "1 GB of OWNER/NAME are fetched once" in fetched.value
    assert "hf download OWNER/NAME" in remedy(fetched, "ok")
    # A folder of the operator's has no name that others could fetch.
    assert not remedy(doctor.check_base("checkpoint", "1 GB", is_here=False), "ok")


def test_texts_of_the_owner(tmp_path, settings):
    run = make_tiny_run(tmp_path / "run").plan()
    letters = tmp_path / "letters.jsonl"
    letters.write_text('{"body": "a letter"}\n')
    asked = replace(settings, texts=str(letters))
    assert "own_texts" in doctor.check_texts(asked, run).value
    open_to_texts = run.model_copy(update={"own_texts": "yes"})
    assert "--text-field" in str(doctor.check_texts(asked, open_to_texts).error)
    found = doctor.check_texts(replace(asked, text_field="body"), open_to_texts)
    assert not remedy(found, "ok")
    assert "stays on this machine" in found.value
    assert not settings.cache_folder.exists()


# -- the command


@pytest.mark.parametrize(
    ("error", "name"),
    [(UnreachableError("no peer answers; check it"), "neighbours"), (ClockError("9 s off; set it"), "clock")],
)
def test_what_joining_ends_with_is_told_and_ends_what_depends_on_it(error, name, monkeypatch, settings):
    def join_run(**options):
        raise error

    monkeypatch.setattr(doctor, "join_run", join_run)
    found = list(doctor.examine_all(settings))
    [problem] = [check for check in found if check.verdict == "problem"]
    assert f"{problem}" == f"PROBLEM {name}: {str(error).replace('; ', ' -> ')}"
    assert {"system", "versions", "disk", "device"} <= {c.name for c in found}
    assert "memory" not in {check.name for check in found}
    assert doctor.exit_code_of(found) == error.exit_code
    assert "found a problem" in doctor.closing_line(found)
    assert str(found[-1]).startswith("ok      device: ")


def test_ports(settings, monkeypatch):
    def check(is_running=False, **where):
        return doctor._check_port(replace(settings, **where), is_running=is_running)

    assert "--port 31337" in remedy(check(port=0), "ok")
    taken = checks.failed("port", doctor.AddressError("cannot listen there; give another (--port 31338)"))
    monkeypatch.setattr(doctor, "check_port_is_free", lambda address: None)
    assert check(port=31337).value == "/ip4/0.0.0.0/tcp/31337, /ip6/::/tcp/31337: free"

    def refuse(address):
        raise taken.error

    monkeypatch.setattr(doctor, "check_port_is_free", refuse)
    assert check(port=31337) == taken
    assert check(port=31337, is_running=True).verdict == "warning"


def test_a_limit_of_a_gpu_where_there_is_none(settings):
    """A peer with this flag would end with the same code."""
    found = list(doctor.examine_all(replace(settings, initial_peers=(), device="cpu", vram_gb=8.0)))
    [problem] = [check for check in found if check.verdict == "problem"]
    assert problem.error.exit_code == ConfigurationError.exit_code
    assert "GPU, not for" in problem.value


@pytest.mark.p2pd
def test_the_command_beside_a_served_run(tmp_path):
    run = make_tiny_run(tmp_path / "run")
    with Swarm(tmp_path, run) as swarm:
        address = swarm.start_bootstrap().address()
        cache = tmp_path / "cache"
        done = command("dipaco-peer", address, "--check", "--device", "cpu", "--cache-dir", cache)
    assert done.stderr == ""
    first, *lines, last = done.stdout.splitlines()
    assert first == "looking at this machine"
    said = {line[8:].partition(":")[0]: line for line in lines}
    # How busy the machine of the test is may show in memory, not in these.
    for name in ("versions", "neighbours", "clock", "run", "disk", "device"):
        assert not said[name].startswith("PROBLEM"), said[name]
    assert run.plan().run_id in said["run"]
    assert "this run takes" in said["memory"]
    assert "Mbit/s" in said["line"]
    assert "others have called it" in said["reachable"]
    assert (done.returncode == 0) == last.startswith("a peer can run here")
    assert not cache.exists()
