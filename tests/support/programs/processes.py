"""Programs that tests run to their end, and whether a process is alive."""

import subprocess
from pathlib import Path


def ran(*words, timeout_s=300.0, **options):
    """Run a program to its end, and return its code and what it said, as text. `options` are those of Popen."""
    options = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False, **options}
    return subprocess.run([*map(str, words)], **options)


def is_running(pid):
    """Return whether a process is alive. A dead one may wait for somebody to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
