"""Settings in a TOML file: the flag `--cache-dir` of `dipaco-peer` is `cache_dir` in `[peer]`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .errors import ConfigurationError, nearest_name
from .files import home_folder, read_toml, tidy
from .settings import Argument

CONFIG_VARIABLE = "DIPACO_CONFIG"


def default_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the settings file that is read when none is named; it need not exist."""
    base = tidy(environment.get("XDG_CONFIG_HOME", "")) or str(home_folder() / ".config")
    return Path(base) / "dipaco" / "config.toml"


def find_file(named: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the settings file to read: that of `--config`, else of the variable, else the default
    if there is one. Raises ConfigurationError for a named file that does not exist."""
    for source, name in (("--config", named), (CONFIG_VARIABLE, environment.get(CONFIG_VARIABLE))):
        if name and (name := tidy(name)):
            path = Path(name).expanduser()
            if not path.is_file():
                raise ConfigurationError(f"{source} {name}: there is no such file")
            return path
    path = default_file(environment)
    return path if path.is_file() else None


def read_settings(
    path: Path,
    table: Sequence[str],
    arguments: Iterable[Argument],
    *,
    commands: Collection[str] = (),
    is_shared: bool = False,
) -> dict[str, Any]:
    """Return the settings that a file gives to a command, by name of the field.

    `table` is where they are: ("bootstrap", "serve") is `[bootstrap.serve]`. `commands` are all of
    the program, if it has several. In a table that `is_shared`, another command knows the rest.
    Relative names of files are looked up beside the file. Raises ConfigurationError for what is not
    TOML, for a value of the wrong kind, and for tables and keys that nobody reads.
    """
    shown = f"[{'.'.join(table)}]"
    values: Any = read_toml(path)
    for word, known in zip(table, ({*_programs(), table[0]}, commands), strict=False):
        for name, value in values.items():
            if not isinstance(value, dict):
                raise ConfigurationError(
                    f"{path}: {name} stands in no table of a command; write it under {shown}, for "
                    "example"
                )
        _refuse_unknown(values, known, f"{path}: table ")
        values = values.get(word, {})
    known_arguments = {argument.key: argument for argument in arguments}
    if not is_shared:
        _refuse_unknown(values, known_arguments, f"{path}: {shown} ")
    return {
        argument.name: _value(argument, values[key], f"{path}: {shown} {key}", path.absolute())
        for key, argument in known_arguments.items()
        if key in values
    }


def _programs() -> set[str]:
    """Return what our programs are called, without `dipaco-`."""
    try:
        entries = distribution("dipaco").entry_points
    except PackageNotFoundError:
        return set()
    return {entry.name.removeprefix("dipaco-") for entry in entries}


def _refuse_unknown(names: Iterable[str], known: Collection[str], before: str) -> None:
    for name in names:
        if name not in known:
            guess = nearest_name(name, known)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(sorted(known))}"
            raise ConfigurationError(f"{before}{name} is unknown; {hint}")


def _value(argument: Argument, given: Any, where: str, file: Path) -> Any:
    """Return the value of a setting; `given` is what TOML makes of it."""
    kind, wanted = argument.kind, _WANTED.get(argument.kind, "a text")
    if argument.takes_words:
        words = [given] if isinstance(given, str) else given
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(words)
        wanted = "a list of texts"
    elif get_origin(kind) is Literal:
        if given in get_args(kind):
            return given
        wanted = " or ".join(map(str, get_args(kind)))
    elif kind is bool and isinstance(given, bool):
        # What a switch with the default true takes back, it is named for.
        return given != argument.default
    elif kind is float and type(given) is int:
        return float(given)
    elif kind is Path and isinstance(given, str):
        return file.parent / Path(tidy(given)).expanduser()
    elif type(given) is kind:
        return given
    raise ConfigurationError(f"{where} must be {wanted}, not {given!r}")


_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}
