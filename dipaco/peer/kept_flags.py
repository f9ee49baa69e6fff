"""The flags of the last start, which plain `dipaco-peer` uses again.

They are in a settings file (`dipaco.base.settings_file`) in the cache folder, which its owner may
read and edit: the flags are keys of the table `[peer]`. A flag that is typed wins over it.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipaco.base.errors import DipacoError
from dipaco.base.files import atomic_write
from dipaco.base.settings import Argument, Typed, arguments_of
from dipaco.base.settings_file import read_settings

from .peer_settings import PeerSettings, default_cache_folder

NAME = "flags.toml"
# They speak of one start, or are kept elsewhere.
ONCE = {
    "check",
    "install_service",
    "fresh",
    "invitation",
    "max_rounds",
    "cache_folder",
    "initial_peers",
}
# They are about one swarm, and another address may belong to another swarm.
OF_A_SWARM = ("run", "path", "stay")
# What is typed takes the place of its opposite.
OPPOSITES = {"device": "devices", "port": "host_maddrs"}
HEADER = """\
# The flags of the last start, which dipaco-peer uses again. A flag that is typed wins over them,
# and dipaco-peer --fresh forgets them.
[peer]
"""


def kept_flags(
    flags: Mapping[str, Any], configured: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Return the file with what was typed before, and what of that still holds beside `flags`.

    Raises ConfigurationError, which names the file, for what cannot be read.
    """
    folder = (dict(configured) | dict(flags)).get("cache_folder") or default_cache_folder()
    file = Path(folder) / NAME
    if flags.get("fresh") or not file.is_file():
        return file, {}
    kept = read_settings(file, ("peer",), [a for a in _arguments() if a.name not in ONCE])
    replaced = {*OF_A_SWARM} if "initial_peers" in flags else set()
    for one, other in OPPOSITES.items():
        replaced |= {other} if one in flags else set()
        replaced |= {one} if other in flags else set()
    return file, {name: value for name, value in kept.items() if name not in replaced}


def keep_flags(cache_folder: Path, typed: Typed) -> None:
    """Keep what was typed, now and before. A full disk does not matter."""
    told = {**typed.before, **typed.now}
    lines = [
        f"{argument.key} = {_toml(argument, told[argument.name])}\n"
        for argument in _arguments()
        if argument.name in told and argument.name not in ONCE
    ]
    file = cache_folder / NAME
    with contextlib.suppress(DipacoError, OSError):
        if lines:
            atomic_write(file, (HEADER + "".join(lines)).encode())
        else:
            file.unlink(missing_ok=True)


def as_last_time(typed: Typed) -> str:
    """Return a line about what is not typed now and holds from before, "" if there is nothing."""
    words = [
        word
        for argument in _arguments()
        if argument.name in typed.before
        for word in _words(argument, typed.before[argument.name])
    ]
    return f"as last time: {shlex.join(words)} (forget with --fresh)" if words else ""


def _arguments() -> list[Argument]:
    return arguments_of(PeerSettings)


def _toml(argument: Argument, value: Any) -> str:
    """Return a value as TOML. Texts and lists of them are written as in JSON."""
    if argument.kind is bool:
        # What a switch takes back, it is named for.
        return json.dumps(value != argument.default)
    if argument.kind is Path:
        value = str(Path(value).absolute())
    return json.dumps(list(value) if argument.takes_words else value, ensure_ascii=False)


def _words(argument: Argument, value: Any) -> list[str]:
    if argument.kind is bool:
        return [argument.shown] if value != argument.default else []
    if argument.takes_words and not argument.option.one_by_one:
        return [argument.shown, *value]
    values = value if argument.takes_words else (value,)
    shown = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
    return [word for one in shown for word in (argument.shown, one)]
