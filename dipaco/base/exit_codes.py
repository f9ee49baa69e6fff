"""What each exit code means and what to do about it.

`python -m dipaco.base.exit_codes` prints the rows of `docs/exit-codes.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import errors


@dataclass(frozen=True)
class ExitCode:
    """One code. The texts are Markdown, for a page in `docs/`."""

    code: int
    name: str
    what_happened: str
    what_to_do: str
    is_final: bool = False
    """Whether the next start would fail in the same way."""


EXIT_CODES = (
    ExitCode(
        0,
        "",
        "done, also after a clean leave with Ctrl+C; for `dipaco-status`: the swarm is healthy",
        "",
    ),
    ExitCode(
        errors.DipacoError.exit_code,
        "",
        (
            "an error without a code of its own (the line then calls it unexpected, or names the "
            "background thread in which it happened; please report it); for `dipaco-status`: "
            "problems, listed in `problems`"
        ),
        "read the line",
    ),
    ExitCode(
        errors.UnreachableError.exit_code,
        "unreachable",
        (
            "none of the given addresses answers; also wrong flags, with the usage line of "
            "the argument parser"
        ),
        "check the address, the port and the firewall; try another peer's address",
    ),
    ExitCode(
        errors.ConfigurationError.exit_code,
        "configuration",
        (
            "a flag, a `RUN.toml` or a plan with an unknown or impossible value; a model that"
            " does not fit in memory"
        ),
        "the line names the field, the value seen and the nearest known name",
        is_final=True,
    ),
    ExitCode(
        errors.AddressError.exit_code,
        "address",
        (
            "a malformed multiaddress, a port in use, an identity or folder that another "
            "process does not release within 15 s"
        ),
        "the line shows an example, or the flag to change",
    ),
    ExitCode(
        errors.RunSelectionError.exit_code,
        "run selection",
        "the DHT holds no run, several runs while `--run` is missing, or not the run asked for",
        "the line lists the runs; give `--run ID`",
    ),
    ExitCode(
        errors.ManifestError.exit_code,
        "manifest",
        (
            "a manifest that cannot be read, whose signature or hash is wrong, or that was "
            "not signed by the operator that the address names"
        ),
        "ask the operator; never train such a run",
        is_final=True,
    ),
    ExitCode(
        errors.IntegrityError.exit_code,
        "integrity",
        "bytes with a wrong hash, or a state of the wrong shape",
        "start again, which tries other holders; delete the named file if it is local",
    ),
    ExitCode(
        errors.ClockError.exit_code,
        "clock",
        "this machine's clock is more than a few seconds off",
        "`sudo timedatectl set-ntp true`",
    ),
    ExitCode(
        errors.StorageError.exit_code,
        "storage",
        "disk full, or a file or folder that cannot be read or written",
        "free space or give another `--cache-dir`",
    ),
    ExitCode(
        errors.CorpusError.exit_code,
        "corpus",
        "a corpus that cannot be read, has no such field, or leaves a path's shard empty",
        "the line names file, field or path, and what to write",
    ),
    ExitCode(
        errors.ProtocolVersionError.exit_code,
        "protocol version",
        (
            "the swarm speaks another version of the protocol, or the address is of a plain "
            "Hivemind node"
        ),
        "install the version that the line or the operator names: [upgrading](upgrading.md)",
        is_final=True,
    ),
    ExitCode(
        errors.NetworkError.exit_code,
        "network",
        "the network layer died and could not be started again for an hour, a connection broke, or "
        "a bounded wait for other peers ran out",
        "start again; the peer resumes from its cache folder",
    ),
    ExitCode(
        errors.AdmissionError.exit_code,
        "admission",
        (
            "the run is by invitation, and this peer has none, or one that is expired, "
            "revoked, of another run or operator, or whose places are all taken"
        ),
        "ask the operator for one: `--invitation TEXT`",
    ),
    ExitCode(
        errors.MachineError.exit_code,
        "machine",
        (
            "this machine computes otherwise than the others: its memory or processor is damaged "
            "or overclocked, or a library changes its arithmetic"
        ),
        "test the memory, undo overclocking; run dipaco in an environment of its own",
        is_final=True,
    ),
    ExitCode(
        130,
        "",
        (
            "`dipaco-peer` and `dipaco-bootstrap serve`: Ctrl+C before the swarm was joined; a "
            "second Ctrl+C, exit at once; or leaving took longer than nine seconds. Other "
            "commands: Ctrl+C"
        ),
        "",
    ),
)


def table() -> list[str]:
    """Return the rows of the table in docs/exit-codes.md."""
    return [
        _row(str(e.code), e.name, e.what_happened, e.what_to_do, _whether_again(e))
        for e in EXIT_CODES
    ]


def _whether_again(code: ExitCode) -> str:
    """Return whether a script or a service may start a peer again."""
    return ("no" if code.is_final else "yes") if code.code else ""


def _row(*cells: str) -> str:
    return " ".join(("|", *(f"{cell} |".strip() for cell in cells)))


def final_codes() -> tuple[int, ...]:
    """Return the codes after which a service does not start a peer again."""
    return tuple(code.code for code in EXIT_CODES if code.is_final)


if __name__ == "__main__":
    print("\n".join(table()))
