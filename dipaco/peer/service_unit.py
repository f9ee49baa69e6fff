"""`dipaco-peer --install-service`: a unit for systemd that starts the same peer with every boot."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dipaco.base.errors import ConfigurationError, StorageError, final_codes
from dipaco.base.files import atomic_write, folder_variable, home_folder

FLAG = "--install-service"
# A service gets none of a terminal's variables; these change which programs, files and GPUs a peer
# uses.
KEPT_VARIABLES = (
    "PATH",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
UNIT = """\
# Written by dipaco-peer --install-service; the same command writes it anew.
[Unit]
Description=dipaco peer
StartLimitIntervalSec=3600
StartLimitBurst=20

[Service]
Type=exec
WorkingDirectory={folder}
{environment}ExecStart={command}
# It leaves within ten seconds: hands over what only it has, and withdraws its claim.
KillSignal=SIGINT
KillMode=mixed
TimeoutStopSec=20
# Codes of docs/exit-codes.md. What another start does not mend ends here.
Restart=on-failure
RestartSec=30
RestartPreventExitStatus={final}
LimitNOFILE=16384

[Install]
WantedBy=default.target
"""


def install_service(
    words: Sequence[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> str:
    """Write the unit of this user for a peer with these words; return what to type next.

    Raises ConfigurationError where systemd does not run, and StorageError.
    """
    if not (root / "run/systemd/system").is_dir():
        raise ConfigurationError(
            f"{FLAG}: this machine does not run systemd; start the peer in tmux or with nohup, "
            "or in a container (examples/deploy)"
        )
    base = folder_variable("XDG_CONFIG_HOME") or str(home_folder() / ".config")
    file = Path(base) / "systemd" / "user" / "dipaco-peer.service"
    # The flag may be shortened.
    command = [*program(), *(w for w in words if not (len(w) > 2 and FLAG.startswith(w)))]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # For this user alone: an invitation may be among the words.
        atomic_write(file, unit(command, environment, Path.cwd()).encode(), 0o600)
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror}") from None
    return f"""\
wrote {file}, which starts
    {shlex.join(command)}
start it now and at every boot:
    systemctl --user daemon-reload
    systemctl --user enable --now dipaco-peer
    loginctl enable-linger
read its log:
    journalctl --user -u dipaco-peer -f
after an update (it knows its address):
    systemctl --user restart dipaco-peer
end it for good:
    systemctl --user disable --now dipaco-peer"""


def program() -> list[str]:
    """Return how this program is started without a PATH."""
    script = Path(sys.executable).with_name("dipaco-peer")
    return [str(script)] if script.exists() else [sys.executable, "-m", "dipaco.peer.peer_command"]


def unit(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Return the text of the unit. Relative names of files stay those of `folder`."""
    variables = [
        f"Environment={_quoted(f'{name}={environment[name]}', '%')}\n"
        for name in KEPT_VARIABLES
        if name in environment
    ]
    return UNIT.format(
        folder=str(folder).replace("%", "%%"),
        environment="".join(variables),
        command=" ".join(_quoted(word, "%$") for word in command),
        final=" ".join(map(str, final_codes())),
    )


def _quoted(word: str, doubled: str) -> str:
    """Return a word as systemd reads it: what it would replace stands twice."""
    for character in doubled:
        word = word.replace(character, 2 * character)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"' if escaped != word or not word or set(word) & set(" \t';") else word
