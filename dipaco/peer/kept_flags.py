"""The flags of the last start, which plain `dipaco-peer` uses again.

They stand in a file of the cache folder, as they are typed, one a line; its owner may edit it. A
flag that is typed wins over it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipaco.base.command_line import LastTime
from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.files import atomic_write
from dipaco.base.settings import Argument, Typed, arguments_of

from .peer_settings import PeerSettings, default_cache_folder

NAME = "flags.txt"
# These flags are about one start, or are kept elsewhere.
_ONCE = {
    "check",
    "fresh",
    "forget_texts",
    "invitation",
    "max_rounds",
    "cache_folder",
    "initial_peers",
}
# These flags are about one swarm, and another address may belong to another swarm: texts are for
# the one that their owner named.
_OF_TEXTS = ("texts", "text_field", "only_my_texts")
_OF_A_SWARM = ("run", "path", "stay", *_OF_TEXTS)
# What is typed takes the place of its opposite.
_OPPOSITES = {"device": "devices", "port": "host_maddrs"}
_HEADER = """\
# The flags of the last start, which dipaco-peer uses again. A flag that is typed wins over them,
# and dipaco-peer --fresh forgets them.
"""


def kept_flags(flags: Mapping[str, Any]) -> LastTime:
    """Return what was typed before, and what of that does not hold beside `flags`.

    Raises ConfigurationError, which names the file, for what cannot be read.
    """
    file = Path(flags.get("cache_folder") or default_cache_folder()) / NAME
    if flags.get("fresh") or not file.is_file():
        return LastTime(file, [], set())
    try:
        words = shlex.split(file.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file}: {error}; correct it, or forget it with --fresh"
        ) from None
    replaced = _ONCE | ({*_OF_A_SWARM} if "initial_peers" in flags else set())
    replaced |= {*_OF_TEXTS} if flags.get("forget_texts") else set()
    for one, other in _OPPOSITES.items():
        replaced |= {other} if one in flags else set()
        replaced |= {one} if other in flags else set()
    return LastTime(file, words, replaced)


def keep_flags(cache_folder: Path, typed: Typed) -> None:
    """Keep what was typed, now and before. A full disk does not matter."""
    told = {**typed.before, **typed.now}
    lines = [f"{shlex.join(words)}\n" for words in _words(told)]
    file = cache_folder / NAME
    with contextlib.suppress(DipacoError, OSError):
        if lines:
            atomic_write(file, (_HEADER + "".join(lines)).encode())
        else:
            file.unlink(missing_ok=True)


def as_last_time(typed: Typed) -> str:
    """Return a line about what is not typed now and holds from before, "" if there is nothing."""
    words = [word for flag in _words(typed.before) for word in flag]
    return f"as last time: {shlex.join(words)} (forget with --fresh)" if words else ""


def _words(told: Mapping[str, Any]) -> list[list[str]]:
    """Return the words of each flag that is kept."""
    kept = [a for a in arguments_of(PeerSettings) if a.name in told.keys() - _ONCE]
    return [words for a in kept for words in _words_of(a, told[a.name])]


def _words_of(argument: Argument, value: Any) -> list[list[str]]:
    if argument.kind is bool:
        return [[argument.shown]] if value != argument.default else []
    if argument.takes_words and not argument.option.one_by_one:
        return [[argument.shown, *value]]
    return [_pair(argument.shown, one) for one in (value if argument.takes_words else (value,))]


def _pair(flag: str, value: Any) -> list[str]:
    """Return a flag and its value; a value that would be taken for a flag is one word with it."""
    value = value.absolute() if isinstance(value, Path) else value
    said = f"{value:.15g}" if isinstance(value, float) else str(value)
    return [f"{flag}={said}"] if said.startswith("-") else [flag, said]
