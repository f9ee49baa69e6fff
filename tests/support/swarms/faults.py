"""What tests of accidents need: aim at a boundary, see what is left over, compare digests."""

import os
import time
from pathlib import Path

from .swarm import LIMIT_S

STATE_EVENTS = ("outer_step", "adopt")


def next_boundary(member, module, timeout_s=LIMIT_S):
    """Wait until a member comes to its next boundary of `module`, to aim at."""
    seen = len(boundaries(member, module))
    deadline = time.monotonic() + timeout_s
    while len(boundaries(member, module)) == seen:
        assert time.monotonic() < deadline, f"no boundary of {module} at {member.name}"
        time.sleep(0.02)


def boundaries(member, module):
    """Return the boundaries of `module` that a member has come to."""
    return [event for event in member.of("outer_round") if event["module"] == module]


def processes_of(member):
    """Return the command lines of all living processes of a member.

    They are in its session, or (p2pd) name its cache folder or identity.
    """
    is_bootstrap = member.name == "bootstrap"
    mark = str(member.folder / "run/identity.key" if is_bootstrap else member.cache)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        ours = int(session) == member.popen.pid or mark in line
        if ours and state != "Z" and int(entry.name) != os.getpid():
            found.append(f"{entry.name} {line[:120]}")
    return found


def assert_gone(member, within_s=60.0):
    """Check that no process of a member that has ended is left."""
    deadline = time.monotonic() + within_s
    while left := processes_of(member):
        assert time.monotonic() < deadline, f"left over of {member.name}: {left}"
        time.sleep(0.1)


def first_after(member, kind, position):
    """Return the first event of a kind behind a position of the member's events."""
    return next((e for e in member.read()[position:] if e["event"] == kind), None)


def digests_by_version(members):
    """Return for each (module, version) the digests that members have had, and who had them."""
    found = {}
    for member in members:
        for event in member.read():
            if event["event"] in STATE_EVENTS:
                version = found.setdefault((event["module"], event["version"]), {})
                version.setdefault(event["digest"], []).append(member.name)
    return found


def newest_versions(members):
    """Return the newest version of each module that a member has had."""
    newest = {}
    for module, version in digests_by_version(members):
        newest[module] = max(version, newest.get(module, 0))
    return newest


def partial_anchors(members):
    """Return where a peer carried on with an anchor that no step ever made."""
    members = list(members)
    found = []
    for member in members:
        anchors = {}
        for event in member.read():
            if event["event"] in STATE_EVENTS:
                anchors[event["module"]] = event["digest"]
            elif event["event"] == "training":
                anchors.clear()
            elif event["event"] == "carry_on" and event["anchor"] != anchors.get(event["module"], event["anchor"]):
                found.append(event)
    return found
