"""What people install and run for long: wheel, source archive, container, services, notebook."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dipaco.bootstrap import bootstrap_command
from dipaco.peer import peer_command
from support.programs.commands import ROOT, options_of, parsers
from support.programs.processes import ran

# dipaco/ has a link to each room.
DEPLOY = ROOT / "examples" / "deploy"
LOCKS = ROOT / "requirements"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebook").glob("*.ipynb"))
FILES = [*sorted(file for file in DEPLOY.iterdir() if file.is_file()), *NOTEBOOKS]
# The page has the unit of a user as text.
UNITS = [*sorted(DEPLOY.glob("*.service")), ROOT / "docs" / "volunteers.md"]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def files_of(root, folders):
    return {str(file.relative_to(root)) for folder in folders for file in (root / folder).rglob("*") if file.is_file()}


def test_the_archives_hold_everything(tmp_path):
    """The source archive holds all that its own `make test` needs. The wheel, which is made from
    it, holds every module and what else lies in their folders.
    """
    others = (".ci", ".github", "benchmarks", "docs", "examples", "requirements", "site", "tests")
    tree = tmp_path / "tree"
    for folder in ("dipaco", *others):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=LEFT_OUT)
    names = {file.name for file in ROOT.iterdir() if file.is_file() and file.name != "PKG-INFO"}
    if (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        folders = {line.split("/")[0] for line in tracked.splitlines() if "/" in line}
        assert folders == {"dipaco", *others}
        names &= set(tracked.splitlines())
    for name in names:
        shutil.copy(ROOT / name, tree)
    _build(tree, "sdist", tmp_path)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    modules = files_of(tree, ("dipaco",))
    wanted = modules | files_of(tree, others) | names
    assert wanted <= files_of(unpacked, (".",))

    _build(unpacked, "wheel", tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        held = {name for name in found.namelist() if ".dist-info/" not in name}
        [entries] = [name for name in found.namelist() if name.endswith("entry_points.txt")]
        scripts = found.read(entries).decode()
    assert held == modules
    assert "dipaco/py.typed" in held
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, target in project["scripts"].items():
        assert f"{name} = {target}" in scripts


def _build(tree, kind, out):
    program = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    done = ran(sys.executable, "-c", program, cwd=tree)
    assert done.returncode == 0, done.stderr


def text_of(file):
    """Return what a file tells a shell to do; of a notebook its cells."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n".join("".join(cell["source"]) for cell in cells)
    return text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_commands_and_flags_in_the_files_exist(file):
    known = parsers()
    text = re.sub(r"\s*\\\n[#\s]*", " ", text_of(file))
    for line in text.splitlines():
        found = re.findall(r"(dipaco-[a-z]+)((?: (?:[^\s&|;'\"`]+|\"[^\"]*\"))*)", line)
        for program, rest in found:
            words = rest.split()
            flags = {word.split("=")[0] for word in words if word.startswith("--")}
            name = next((n for n in (f"{program} {w}" for w in words[:1]) if n in known), program)
            if flags or name in known:
                assert flags <= options_of(known[name]), line


def test_no_settings_are_in_variables():
    named = {name for file in FILES for name in re.findall(r"\bDIPACO_\w+", text_of(file))}
    assert named == set()


def test_the_services_start_commands_with_flags_that_can_be():
    flags = dict(re.findall(r'^(\w+)="(.*)"$', (DEPLOY / "flags").read_text(), re.M))
    for program, words in ((peer_command.COMMAND, []), (bootstrap_command.COMMAND, ["serve", "run"])):
        name = f"{program.name.removeprefix('dipaco-').upper()}_FLAGS"
        assert f" ${name}\n" in (DEPLOY / f"{program.name}.service").read_text()
        parsed = program.parse([*words, *shlex.split(flags[name])])
        settings = parsed._command.read(parsed)
        assert settings.initial_peers or settings.announce_maddrs


@pytest.mark.parametrize("unit", UNITS, ids=lambda file: file.name)
def test_a_service_is_not_started_again_after_what_that_does_not_mend(unit):
    text = unit.read_text()
    [codes] = re.findall(r"^ *RestartPreventExitStatus=(.*)$", text, re.M)
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    assert codes.split() == re.findall(r"^\| (\d+) \|.*\| no \|$", page, re.M)
    assert "Restart=on-failure" in text
    # Longer than a peer takes to leave.
    assert "TimeoutStopSec=20" in text


def test_the_compose_file_names_what_there_is():
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = found["services"]
    assert services["peer"]["deploy"]["replicas"] == 3
    build = services["bootstrap"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text()
    for name in build["args"]:
        assert f"ARG {name}" in dockerfile
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in found["volumes"] or (DEPLOY / source).is_dir(), volume
    assert (ROOT / "examples" / "tiny" / "RUN.toml").is_file()


def test_the_image_has_what_its_build_needs():
    """Whatever is left out of the build is nothing that the package is made of."""
    left_out = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"dipaco", "pyproject.toml", "README.md", "LICENSE", "requirements"}
    assert not needed & set(left_out)
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    [torch] = [d for d in project["project"]["dependencies"] if d.startswith("torch")]
    assert f'"{torch}"' in dockerfile
    assert "\nUSER dipaco\n" in dockerfile


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("dipaco.lock", ["mirrors", "prepare"]), ("dev.lock", ["mirrors", "prepare", "serve", "gguf", "dask", "dev"])],
)
def test_the_locks_hold_what_the_project_asks_for(lock, extras):
    """After a change of dependencies: make lock."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (LOCKS / lock).read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *(line for name in extras for line in optional[name])]:
        wanted = Requirement(text)
        if wanted.name not in {"torch", "dipaco"}:
            assert pinned[canonicalize_name(wanted.name)] in wanted.specifier, text


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_calls_targets_of_the_makefile(file):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    jobs = yaml.safe_load(file.read_text())["jobs"]
    called = set()
    for job in jobs.values():
        assert job["timeout-minutes"] <= 360, "no job has longer"
        for step in job["steps"]:
            called.update(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert called
    assert called <= targets


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_one_without_outputs(file):
    notebook = json.loads(file.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert {"id", "cell_type", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


# Slurm's part: a step on one node.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 SLURM_GPUS_ON_NODE=2 SLURM_CPUS_PER_TASK=4 exec "$@"
"""
PEER = """#!/bin/bash
echo "$@" > "$HOME/given"
trap 'touch "$HOME/left"; exit 0' TERM
touch "$HOME/begun"
while :; do sleep 0.05; done
"""


def test_the_peers_of_a_slurm_job_are_told_before_its_limit(tmp_path):
    """The script alone gets Slurm's signal, tells the peers of each node, and waits for them."""
    for name, text in (("srun", SRUN), ("dipaco-peer", PEER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(DEPLOY / "peers.sbatch"), "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"],
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert (tmp_path / "left").exists()
    assert "--devices cuda:0 cuda:1 --threads 4 --cache-dir " in (tmp_path / "given").read_text()
    assert "#SBATCH --signal=B:" in (DEPLOY / "peers.sbatch").read_text()
