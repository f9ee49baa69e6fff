"""`dipaco-peer --check`: what it looks at, what it says of it, and which remedy it names."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from dipaco.base.errors import AddressError, ConfigurationError, StorageError, UnreachableError
from dipaco.modules import device
from dipaco.modules.layout import layout_of
from dipaco.modules.memory import free_bytes, head_bytes
from dipaco.modules.transformer import LOGITS_AT_ONCE_ON_GPU
from dipaco.peer.check import checks, doctor, needs, this_machine
from dipaco.peer.check.checks import MemoryNeed
from dipaco.peer.check.swarm import SwarmReport
from dipaco.peer.check.this_machine import Disk, Gpu, Memory, System, Versions
from dipaco.peer.exchange.contact.diagnosis import Finding
from dipaco.peer.peer_settings import PeerSettings
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import BIN, ENVIRONMENT, LIMIT_S, Swarm

LINUX = System("Debian", "6.1")
WSL = replace(LINUX, wsl=2)
CONTAINER = replace(LINUX, is_container=True)
COLAB = replace(LINUX, notebook="Colab")
GIB = 2**30
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"


def machine_root(folder, files):
    """Make up the files of a this_machine."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


# -- what is looked at


def test_windows_containers_and_notebooks_are_recognised(tmp_path):
    release = {"etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n'}
    two = machine_root(
        tmp_path / "two", {"proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)", **release}
    )
    found = this_machine.look_at_system(two, {})
    assert (found.wsl, found.name) == (2, "Ubuntu 24.04 LTS")
    assert found.kernel == "5.15.153.1-microsoft-standard-WSL2"
    one = machine_root(tmp_path / "one", {"proc/version": "Linux version 4.4.0-19041-Microsoft (Microsoft@x)"})
    assert this_machine.look_at_system(one, {}).wsl == 1
    plain = machine_root(tmp_path / "plain", {"proc/version": "Linux version 6.1.0 (debian)"})
    assert this_machine.look_at_system(plain, {}).wsl == 0
    assert not this_machine.look_at_system(plain, {}).is_container
    docker = machine_root(tmp_path / "docker", {".dockerenv": "", "proc/version": "Linux version"})
    assert this_machine.look_at_system(docker, {}).is_container
    assert this_machine.look_at_system(docker, {"COLAB_RELEASE_TAG": "x"}).notebook == "Colab"
    assert this_machine.look_at_system(plain, {"KAGGLE_KERNEL_RUN_TYPE": "x"}).notebook == "Kaggle"


def test_a_container_s_limit_is_the_memory(tmp_path):
    files = {"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"}
    assert this_machine.look_at_memory(machine_root(tmp_path / "a", files)) == Memory(16 * GIB, 8 * GIB)
    files |= {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB}\n"}
    assert this_machine.look_at_memory(machine_root(tmp_path / "b", files)) == Memory(4 * GIB, 3 * GIB)
    files["sys/fs/cgroup/memory.max"] = "max\n"
    assert this_machine.look_at_memory(machine_root(tmp_path / "c", files)) == Memory(16 * GIB, 8 * GIB)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    root = machine_root(tmp_path / "root", {"proc/mounts": f"a / ext4 rw\nC: {tmp_path} 9p rw\nx /other tmpfs rw\n"})
    found = this_machine.look_at_disk(tmp_path / "not" / "there", root)
    assert found.file_system == "9p"
    assert found.is_writable
    assert found.spare_bytes > 0


def test_versions_are_compared_with_what_dipaco_needs(monkeypatch):
    assert this_machine.look_at_versions().unfit == ()
    monkeypatch.setattr(this_machine, "version", lambda name: "2.4.1" if name == "numpy" else "1.1.12")
    monkeypatch.setattr(this_machine, "requires", lambda name: ["numpy<2.4", "hivemind==1.1.12"])
    found = this_machine.look_at_versions()
    assert found.unfit == (("numpy", "2.4.1", "<2.4"),)
    check = checks.check_versions(found)
    assert check.verdict == "problem"
    assert "8-bit codecs fail silently" in check.remedy
    assert "pip install 'numpy<2.4'" in check.remedy


# -- what is said of it


def remedy(check, verdict, exit_code=0):
    assert (check.verdict, check.exit_code) == (verdict, exit_code), check
    assert check.value
    return check.remedy


def test_systems():
    assert remedy(checks.check_system(LINUX), "ok") == ""
    assert "--set-version" in remedy(checks.check_system(replace(LINUX, wsl=1)), "problem", 3)
    assert "docs/windows.md" in remedy(checks.check_system(WSL), "ok")
    assert "/content/drive" in remedy(checks.check_system(COLAB), "warning")
    assert "published port" in remedy(checks.check_system(CONTAINER), "ok")


def test_versions_and_limits():
    assert checks.check_versions(Versions(("dipaco 0.1.0",))).verdict == "ok"
    missing = Versions((), (("torch", "", ">=2.6,<2.14"),))
    assert "pip install 'torch>=2.6,<2.14'" in remedy(checks.check_versions(missing), "problem", 3)
    assert checks.check_open_files(checks.OPEN_FILES).verdict == "ok"
    assert f"ulimit -n {checks.OPEN_FILES}" in remedy(checks.check_open_files(1024), "warning")


def test_ports():
    free, fixed = ("/ip4/0.0.0.0/tcp/0",), ("/ip4/0.0.0.0/tcp/31337",)
    assert "--port 31337" in remedy(checks.check_ports(free, []), "ok")
    assert remedy(checks.check_ports(fixed, []), "ok") == ""
    taken = [AddressError("cannot listen at it: in use; give another (--port 31338)")]
    assert "--port 31338" in remedy(checks.check_ports(fixed, taken), "problem", 4)
    assert checks.check_ports(fixed, taken, peer_is_running=True).verdict == "warning"


def test_neighbours():
    other = ADDRESS.replace("203", "204")
    assert checks.check_neighbours([(ADDRESS, "")]).verdict == "ok"
    some = checks.check_neighbours([(ADDRESS, ""), (other, "connection refused")])
    assert remedy(some, "warning")
    assert other in some.value
    assert remedy(checks.check_neighbours([(ADDRESS, "timed out")]), "problem", 2)


def test_clocks():
    assert checks.check_clock(0.02, 2, LINUX).verdict == "ok"
    assert "timedatectl" in remedy(checks.check_clock(3.0, 1, LINUX), "warning")
    # With such a clock Hivemind does not join.
    assert "timedatectl" in remedy(checks.check_clock(3.1, 1, LINUX), "problem", 8)
    late = checks.check_clock(12.0, 2, LINUX)
    assert "timedatectl" in remedy(late, "problem", 8)
    assert "12.0 s behind 2 neighbours" in late.value
    assert "ahead of" in checks.check_clock(-12.0, 2, LINUX).value
    assert "hwclock" in remedy(checks.check_clock(12.0, 2, WSL), "problem", 8)
    assert "container" in remedy(checks.check_clock(12.0, 2, CONTAINER), "problem", 8)


def test_reachability():
    own = ("/ip4/172.20.1.2/tcp/31337/p2p/12D3KooWPeer",)
    assert checks.check_reachability(own, "direct", 0, LINUX).verdict == "ok"
    plain = remedy(checks.check_reachability(own, "unknown", 4000, LINUX), "warning")
    assert "forward TCP port 4000" in plain
    assert "netsh interface portproxy" in remedy(checks.check_reachability(own, "unknown", 0, WSL), "warning")
    assert "-p 31337:31337" in remedy(checks.check_reachability(own, "unknown", 0, CONTAINER), "warning")
    assert "cannot be called" in remedy(checks.check_reachability(own, "unknown", 0, COLAB), "warning")


def test_the_base_of_adapters():
    assert not remedy(checks.check_base("OWNER/NAME", 10**9, is_in_hub_cache=True), "ok")
    fetched = checks.check_base("OWNER/NAME", 10**9, is_in_hub_cache=False)
    assert "1 GB of OWNER/NAME are fetched once" in fetched.value
    assert "hf download OWNER/NAME" in remedy(fetched, "ok")
    # A folder of the operator's has no name that others could fetch.
    assert not remedy(checks.check_base("checkpoint", 10**9, is_in_hub_cache=False), "ok")


def test_disks(tmp_path):
    disk = Disk(tmp_path, 10 * GIB, "ext4", True)
    assert checks.check_disk(disk, None, 0, LINUX).verdict == "ok"
    assert checks.check_disk(disk, 9 * GIB, 0, LINUX).verdict == "ok"
    assert "--cache-dir" in remedy(checks.check_disk(disk, 11 * GIB, 0, LINUX), "problem", 9)
    assert checks.check_disk(disk, 11 * GIB, 2 * GIB, LINUX).verdict == "ok"
    limited = checks.check_disk(disk, 9 * 10**9, 0, LINUX, limit_bytes=8 * 10**9)
    assert "--max-disk-gb 9 " in remedy(limited, "problem", 9)
    assert limited.value.startswith("8 GB may be used")
    windows = checks.check_disk(replace(disk, file_system="9p"), None, 0, WSL)
    assert "home folder of Linux" in remedy(windows, "warning")
    assert remedy(checks.check_disk(replace(disk, file_system="tmpfs"), None, 0, LINUX), "warning")
    assert remedy(checks.check_disk(replace(disk, is_writable=False), None, 0, LINUX), "problem", 9)


def test_devices():
    gpu = Gpu("RTX 3060", 11 * GIB, 12 * GIB, "bf16")

    def check(gpu, device="auto", maker="NVIDIA", of=""):
        return checks.check_gpu(gpu, device, "cuda:0: no kernels", "2.9.1+cpu", maker, of)

    assert "bf16 (cuda:0: no kernels)" in check(gpu).value
    assert "scaled" in check(replace(gpu, number_format="fp16")).remedy
    assert "half the speed" in check(replace(gpu, number_format="fp32")).remedy
    unused = check(None)
    assert "pip install --force-reinstall torch==2.9.1;" in remedy(unused, "warning")
    assert remedy(check(None, of="NVIDIA"), "warning").startswith("type nvidia-smi")
    assert "pytorch.org" in remedy(check(None, maker="AMD", of="NVIDIA"), "warning")
    assert remedy(check(None, maker="AMD", of="AMD"), "warning").startswith("type rocm-smi")
    assert remedy(check(None, maker="Apple"), "warning").endswith("torch==2.9.1")
    assert "A GPU OF NVIDIA IS HERE" in unused.value
    assert "no kernels" in unused.value
    assert check(None, "cpu").verdict == "ok"
    assert check(None, maker="").verdict == "ok"


def test_the_compiler():
    gpu = Gpu("RTX 3060", 11 * GIB, 12 * GIB, "bf16")
    assert checks.check_compiler(gpu, True).verdict == "ok"
    bare = replace(gpu, missing=("a C compiler", "Python's headers"))
    assert "apt install gcc" in remedy(checks.check_compiler(bare, True), "warning")
    assert "a C compiler, Python's headers" in checks.check_compiler(bare, True).value
    assert checks.check_compiler(bare, False).verdict == "ok"


def test_what_of_the_compiler_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(this_machine, "find_spec", lambda name: None)
    monkeypatch.setattr(this_machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(this_machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert this_machine.missing_for_compiler() == ("Triton", "a C compiler", "Python's headers")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(this_machine, "find_spec", lambda name: object())
    monkeypatch.setattr(this_machine.shutil, "which", lambda name: "/usr/bin/gcc")
    assert this_machine.missing_for_compiler() == ()


def test_a_gpu_of_apple(monkeypatch):
    mps = torch.device("mps")
    monkeypatch.setattr(device, "choose_device", lambda name: (mps, "mps is there"))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: GIB)
    found = this_machine.look_at_device("auto")
    assert found == (Gpu("mps", 9 * GIB, 10 * GIB, "fp32", None), "mps is there")
    assert free_bytes(mps) == 9 * GIB


@pytest.mark.parametrize(
    ("file", "maker"), [("dev/nvidia0", "NVIDIA"), ("dev/kfd", "AMD"), ("usr/lib/wsl/lib/libcuda.so.1", "NVIDIA")]
)
def test_gpus_that_pytorch_may_not_see(file, maker, tmp_path):
    assert this_machine.look_for_gpu_hardware(tmp_path, "Linux aarch64") == ""
    assert this_machine.look_for_gpu_hardware(tmp_path, "Darwin arm64") == "Apple"
    made_up = machine_root(tmp_path, {file: ""})
    assert this_machine.look_for_gpu_hardware(made_up, "Linux x86_64") == maker


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
    fits = checks.check_device_memory(NEED, gpu, None)
    assert fits.verdict == "ok"
    assert fits.value.endswith("; 7 fit")
    assert "--micro-batch-size 7" in remedy(checks.check_device_memory(NEED, gpu, 8), "warning")
    little = replace(gpu, free_bytes=3 * GIB)
    twice = checks.check_device_memory(NEED, little, None)
    assert "close other programs" in remedy(twice, "warning")
    assert "computed twice" in twice.value
    small = replace(gpu, free_bytes=int(2.4 * GIB))
    assert "adamw8bit" in remedy(checks.check_device_memory(NEED, small, None), "problem", 3)


def test_main_memory():
    gpu = Gpu("RTX 3060", 10 * GIB, 12 * GIB, "bf16")

    def check(available, gpu, system=LINUX):
        return checks.check_main_memory(NEED, Memory(32 * GIB, int(available)), gpu, None, system)

    assert check(4 * GIB, gpu).verdict == "ok"
    assert remedy(check(2 * GIB, gpu), "problem", 3)
    # On the CPU all of it is main memory: 2 + 8 + 3 GiB with the whole batch at once.
    assert check(14 * GIB, None).verdict == "ok"
    # Fewer are taken where nobody asked for a number.
    fewer = check(10.5 * GIB, None)
    assert (fewer.verdict, fewer.value[-24:]) == ("ok", "with 5 sequences at once")
    asked = checks.check_main_memory(NEED, Memory(32 * GIB, int(10.5 * GIB)), None, 8, LINUX)
    assert "--micro-batch-size 5 fits" in remedy(asked, "problem", 3)
    assert "adamw8bit" in remedy(check(4 * GIB, None), "problem", 3)
    assert ".wslconfig" in remedy(check(4 * GIB, None, WSL), "problem", 3)
    assert "--memory" in remedy(check(4 * GIB, None, CONTAINER), "problem", 3)


def test_a_run_s_needs(tmp_path, settings):
    plan = make_tiny_run(tmp_path / "run", inner={"optimizer": "adamw"}).plan()
    need = doctor.memory_need(plan, settings, None)
    logits = head_bytes(plan.model, 1, LOGITS_AT_ONCE_ON_GPU)
    assert need.fixed_bytes == 16 * need.path_parameters + logits
    assert need.batch == plan.inner.batch_sequences
    assert (
        need.pass_bytes
        > doctor.memory_need(plan, settings, Gpu("x", 1, 1, "bf16")).pass_bytes - 4 * need.path_parameters
    )
    eight = replace(settings, optimizer="adamw8bit")
    assert doctor.memory_need(plan, eight, None).fixed_bytes == 10 * need.path_parameters + logits
    grid = needs.grid_of(plan)
    main = needs.main_memory_bytes(plan, grid, need.path_parameters)
    assert need.main_bytes == sum(main.values()) + checks.PROGRAMS_BYTES
    assert sum(main.values()) <= 13 * need.path_parameters


def test_nothing_is_claimed_on_a_machine_that_is_too_small(tmp_path, settings, monkeypatch):
    run = make_tiny_run(tmp_path / "run")
    plan = run.plan()
    shards = run.shard_index(plan)
    assert doctor.fitting_batch(settings, plan, shards) == plan.inner.batch_sequences
    takes = {"own states": 2 * 10**9, "contributions": 10**9}
    with monkeypatch.context() as patch:
        patch.setattr(needs, "disk_bytes", lambda *_: takes)
        limited = replace(settings, max_disk_gb=4)
        assert doctor.contributions_limit(limited, plan, shards) == 2 * 10**9
        with pytest.raises(StorageError, match="--max-disk-gb 3 "):
            doctor.fitting_batch(replace(settings, max_disk_gb=2), plan, shards)
    need = doctor.memory_need(plan, settings, None, 0)
    two = Memory(2**40, need.main_bytes + need.fixed_bytes + 2 * need.pass_bytes)
    monkeypatch.setattr(doctor.m, "look_at_memory", lambda: two)
    assert doctor.fitting_batch(settings, plan, shards) == 2
    monkeypatch.setattr(doctor.m, "look_at_memory", lambda: Memory(2**40, need.main_bytes))
    with pytest.raises(ConfigurationError, match="memory: .* free, this run takes"):
        doctor.fitting_batch(settings, plan, shards)


def test_a_member_receives_everybody_else_s_contributions(tmp_path):
    plan = make_tiny_run(tmp_path / "run", modules_per_level=(2, 3), codec="float32").plan()
    grid = needs.grid_of(plan)
    for level, members in (("L0", 3), ("L1", 2)):
        least = 4 * layout_of(grid, level).size * (members - 1)
        assert least <= needs.received_bytes(plan, grid, level) <= 1.05 * least + 1024
    assert needs.too_slow(plan, None) == []
    assert len(needs.too_slow(plan, 1e-6)) == 2


# -- the command


@pytest.fixture
def settings(tmp_path):
    return PeerSettings(initial_peers=(ADDRESS,), device="cpu", cache_folder=tmp_path / "cache")


def test_what_fails_ends_what_depends_on_it(monkeypatch, settings):
    """Nobody answers: the machine itself is looked at all the same, and the exit code says it."""
    silent = Finding(ADDRESS, error=UnreachableError("connection refused"))
    monkeypatch.setattr(doctor, "ask_neighbours", lambda settings: (silent,))
    found = list(doctor.examine_all(settings))
    assert [check.name for check in found if check.verdict == "problem"] == ["neighbours"]
    assert {"system", "versions", "disk", "device"} <= {c.name for c in found}
    assert "memory" not in {check.name for check in found}
    assert doctor.summary(found)["exit_code"] == 2
    assert "found a problem" in doctor.closing_line(found)
    assert doctor.shown(found[-1]).startswith("ok      device: ")


@pytest.mark.parametrize("flags", [{"vram_gb": 8.0}, {"max_gpu_temp": 80.0}])
def test_limits_of_a_gpu_where_there_is_none(settings, flags):
    """A peer with these flags would end with the same code."""
    found = list(doctor.examine_all(replace(settings, initial_peers=(), device="cpu", **flags)))
    [problem] = [check for check in found if check.verdict == "problem"]
    assert problem.exit_code == ConfigurationError.exit_code
    assert "is for a GPU" in problem.value


def test_a_wrong_clock_ends_it_before_joining(monkeypatch, settings):
    answer = Finding(ADDRESS, hello=object(), clock_offset_s=9.0)
    monkeypatch.setattr(doctor, "ask_neighbours", lambda settings: (answer,))
    monkeypatch.setattr(doctor, "ask_swarm", lambda *a, **k: pytest.fail("the clock comes first"))
    found = list(doctor.examine_all(settings))
    assert doctor.summary(found)["exit_code"] == 8


def test_a_swarm_without_the_run(monkeypatch, settings):
    answer = Finding(ADDRESS, hello=object())
    report = SwarmReport(failure=UnreachableError("none answered"))
    monkeypatch.setattr(doctor, "ask_neighbours", lambda settings: (answer,))
    monkeypatch.setattr(doctor, "ask_swarm", lambda settings, port_is_free: report)
    found = list(doctor.examine_all(settings))
    assert [check.name for check in found if check.verdict == "problem"] == ["run"]


@pytest.mark.p2pd
def test_the_command_beside_a_served_run(tmp_path):
    run = make_tiny_run(tmp_path / "run")
    with Swarm(tmp_path, run) as swarm:
        address = swarm.start_bootstrap().address()
        cache = tmp_path / "cache"
        words = ["--check", "--json", "--device", "cpu", "--cache-dir", str(cache)]
        done = subprocess.run(
            [str(BIN / "dipaco-peer"), "--initial-peers", address, *words],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    found = json.loads(done.stdout)
    by_name = {check["name"]: check for check in found["checks"]}
    # How busy the machine of the test is may show in memory, not in these.
    for name in ("versions", "neighbours", "clock", "run", "disk", "device"):
        assert by_name[name]["verdict"] != "problem", by_name[name]
    assert run.plan().run_id in by_name["run"]["value"]
    assert "this run takes" in by_name["memory"]["value"]
    assert "Mbit/s" in by_name["line"]["value"]
    assert done.returncode == found["exit_code"]
    assert not cache.exists()
