"""Part a: tests that have a device as a parameter, exact digests of the outer step, and graphs.

Digests are computed on this machine's processor and compared with the golden values; a test of
tests/training/test_devices.py compares what is gathered from the GPU with the same from the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from parts.common import HERE, one_thread, scratch_folder

from gpu_kit.common import begin

# Of the names of tests and of their files.
CHOSEN = "devices or golden or compiled"
TESTS = (
    "tests/training/test_devices.py",
    "tests/training/test_compiled.py",
    "tests/modules/test_contributions.py",
    "tests/modules/test_outer.py",
    "tests/modules/test_trimmed_mean.py",
    "tests/modules/test_state.py",
)
LIMIT_S = 240


def main() -> int:
    part = begin("unit tests", __doc__)
    with part.measuring("tests"), scratch_folder() as folder:
        found = run_tests(TESTS, folder / "tests.xml")
        part.note("tests", found)
        if found["failed"] or not found["passed"]:
            raise RuntimeError("\n".join(found["failures"]) or "no test ran")
    return part.conclude()


def run_tests(tests: tuple[str, ...], told: Path) -> dict[str, object]:
    """Run test files and return how many passed, failed and were skipped, and which failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", CHOSEN, f"--junitxml={told}"]
    subprocess.run(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=HERE.parent,
        env=one_thread(),
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
    )
    cases = list(ElementTree.parse(told).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or _erred(case)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    on_gpu = [case for case in cases if "cuda" in case.get("name", "") and case not in skipped]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": len(bad),
        "skipped": len(skipped),
        "on_the_gpu": len(on_gpu),
        "failures": [f"{case.get('name')}: {_told(case)}" for case in bad],
    }


def _erred(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def _told(case: ElementTree.Element) -> str:
    found = case.find("failure")
    found = found if found is not None else case.find("error")
    return (found.text or "")[-1500:] if found is not None else ""


if __name__ == "__main__":
    sys.exit(main())
