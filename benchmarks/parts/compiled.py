"""Run a benchmark of the swarm simulator with member and simulator compiled.

    python benchmarks/parts/compiled.py benchmarks/swarm_faults.py --seeds 20000 --json

mypyc, which comes with mypy, makes extension modules of them: the same histories, event by event,
in two thirds of the time. Takes a C compiler, and some five minutes for each new state of the
sources; the result stays in `build/compiled`. Only for simulations: real peers run the plain
modules, and what replaces functions of these (`--protocol earlier`) needs them plain too.
"""

from __future__ import annotations

import argparse
import hashlib
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("modules", "routing", "dht", "peer", "simulator")
COMPILED = (
    "peer/member/*.py",
    "simulator/swarm/*.py",
    *(f"dht/{name}.py" for name in ("agreement", "certificates", "coverage", "keeping", "policy")),
)
# What reads the fields of classes when it is imported, which compiled classes do not show.
PLAIN = ("__init__.py", "recording.py")
BUILD = """
from mypyc.build import mypycify
from setuptools import setup
options = ["--config-file=mypy.toml", "--namespace-packages", "--explicit-package-bases",
    "--follow-imports=silent", "--ignore-missing-imports"]
setup(name="compiled", packages=[],
    ext_modules=mypycify([*options, *{modules}], opt_level="2", debug_level="0", multi_file=True))
"""


def build() -> Path:
    """Return a folder with the package, compiled in part; makes it if the sources are new."""
    sources = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    read = b"".join(path.read_bytes() for path in sources)
    # One Python does not load what another one has made.
    digest = f"{sys.implementation.cache_tag}-{hashlib.sha256(read).hexdigest()[:12]}"
    built = ROOT / "build" / "compiled" / digest
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=built.parent))
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, making / "dipaco" / folder)
    shutil.copy(ROOT / "pyproject.toml", making / "mypy.toml")
    package = making / "dipaco"
    found = sorted(path for pattern in COMPILED for path in package.glob(pattern))
    modules = [str(path.relative_to(making)) for path in found if path.name not in PLAIN]
    (making / "setup.py").write_text(BUILD.format(modules=modules))
    print(f"compiling {len(modules)} modules into {built}: takes minutes", file=sys.stderr)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    made = subprocess.run(command, cwd=making, capture_output=True, text=True, check=False)
    if made.returncode:
        sys.exit(f"error: could not compile; see {making}\n{made.stderr[-2000:]}")
    shutil.rmtree(making / "build")
    if built.exists():  # Somebody else was faster.
        shutil.rmtree(making)
    else:
        making.rename(built)
    return built


def main() -> None:
    """Run the script that the arguments name, with the compiled package in front."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", help="the benchmark to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no {options.script}")
    # An editable install has a finder of its own, which comes before the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
    sys.path.insert(0, str(build()))
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
