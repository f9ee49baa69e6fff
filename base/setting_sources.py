"""One setting of a command, and what can give it: a flag, an environment variable, a TOML file.

All three follow from the `Option` of a field (see `command_line`): the flag
`--cache-dir` of `dipaco-peer` is `cache_dir` under `[peer]` and the variable
`DIPACO_PEER_CACHE_DIR`. A flag wins over a variable, that over the file, that over the default.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .errors import ConfigurationError, nearest_name
from .files import decoded, home_folder

CONFIG_VARIABLE = "DIPACO_CONFIG"
DEFAULT_ORIGIN = "default"
# Where a parser puts the words that no flag takes.
LOOSE = "_loose"
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True,
             "0": False, "false": False, "no": False, "off": False}  # fmt: skip


class _Words(argparse.Action):
    """Words of a flag, which may be given again for more of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*given, *values] if isinstance(given, list) else values)


@dataclass(frozen=True)
class Place:
    """Where the settings of a command are: ("bootstrap", "serve") is the table
    `[bootstrap.serve]`, and the variables that begin with `DIPACO_BOOTSTRAP_SERVE_`."""

    words: tuple[str, ...]
    is_shared: bool = False
    """It is the place of another command too, which knows the other settings there."""

    @property
    def table(self) -> str:
        return f"[{'.'.join(self.words)}]"

    def variable(self, key: str) -> str:
        """Return the environment variable of a setting."""
        return "_".join(["DIPACO", *self.words, key]).replace("-", "_").upper()


@dataclass(frozen=True)
class Option:
    """How a field of settings is given on the command line.

    A flag is the field's name with hyphens unless `flag` says otherwise; `positional` arguments
    have none, and are named by `metavar`. `least` and `most` bound a number. Of the fields with
    one `alternative_to`, exactly one must be given. A `secret` is not shown by `--show-config`.
    `check` raises for a word that cannot be. Where some are `common`, `--help` shows these alone;
    words that no flag takes are values of a field with `loose`.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    least: float | None = None
    most: float | None = None
    positional: bool = False
    alternative_to: str = ""
    secret: bool = False
    check: Callable[[str], None] | None = None
    common: bool = False
    loose: bool = False


@dataclass(frozen=True)
class Given:
    """The value of a setting, and what gave it: for messages and `--show-config`."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Argument:
    """A field of settings together with its option."""

    field: Field[Any]
    option: Option
    kind: Any
    """The type of the value, without None."""
    group: str

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def shown(self) -> str:
        """What a user types, for messages."""
        if self.option.positional:
            return self.option.metavar or self.name
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        """Its name in a settings file."""
        if self.option.positional:
            return self.name
        return self.shown.removeprefix("--").replace("-", "_")

    @property
    def takes_words(self) -> bool:
        """Whether it takes all words up to the next flag."""
        return get_origin(self.kind) is tuple

    @property
    def default(self) -> Any:
        """The default, MISSING if there is none."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @property
    def help(self) -> str:
        """The help, with the default where that is a value to type and not mentioned."""
        default = self.default
        if default in (MISSING, None, (), "") or self.kind is bool or "default" in self.option.help:
            return self.option.help
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{self.option.help} (default: {shown})"

    def check(self, value: Any, where: str = "") -> None:
        """Raise ConfigurationError, naming the flag or `where`, for a number out of bounds, and
        what the option's `check` raises."""
        if self.option.check is not None:
            for word in value if self.takes_words else [value] if value is not None else ():
                self.option.check(word)
        if self.kind not in (int, float) or value is None:
            return
        least, most, where = self.option.least, self.option.most, where or self.shown
        if not math.isfinite(value):
            raise ConfigurationError(f"{where} {value} must be a finite number")
        if (least is None or value >= least) and (most is None or value <= most):
            return
        bounds = f"at least {least:g}" if most is None else f"{least or 0:g} to {most:g}"
        raise ConfigurationError(f"{where} {value} must be {bounds}")

    def add_to(
        self,
        parser: argparse._ActionsContainer,
        place: Place | None,
        *,
        may_be_missing: bool = False,
    ) -> None:
        """Add it to a parser; its help names the variable too, if there is a place for them."""
        variable = f" [{place.variable(self.key)}]" if place is not None else ""
        keywords: dict[str, Any] = {"help": f"{self.help}{variable}"}
        if self.kind is bool:
            action = "store_false" if self.default else "store_true"
            parser.add_argument(self.shown, dest=self.name, action=action, **keywords)
            return
        if self.option.metavar:
            keywords["metavar"] = self.option.metavar
        if get_origin(self.kind) is Literal:
            keywords["choices"] = get_args(self.kind)
        elif self.takes_words:
            keywords |= {"nargs": "+", "action": _Words}
        elif self.kind is not str:
            keywords["type"] = self.kind
        if self.option.positional:
            parser.add_argument(self.name, nargs="?" if may_be_missing else None, **keywords)
            return
        if self.default is MISSING:
            keywords["required"] = True
        else:
            keywords["default"] = self.default
        parser.add_argument(self.shown, dest=self.name, **keywords)

    def add_loose_to(self, parser: argparse._ActionsContainer) -> None:
        """Let a parser take the words that no flag takes as values of this one."""
        parser.add_argument(LOOSE, nargs="*", metavar=self.option.metavar, help=self.help)


def default_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the settings file that is read when none is named; it need not exist."""
    base = environment.get("XDG_CONFIG_HOME") or str(home_folder() / ".config")
    return Path(base) / "dipaco" / "config.toml"


def gather(
    arguments: Sequence[Argument],
    place: Place,
    flags: Mapping[str, Given],
    named_file: str | None,
    environment: Mapping[str, str],
) -> dict[str, Given]:
    """Return the settings of a command by name of the field: flags over variables, those over the
    settings file, that over defaults. What must be given and is not is missing.

    Raises ConfigurationError for a variable, file or key that cannot be, and for two of several
    alternatives.
    """
    path = find_file(named_file, environment)
    defaults = {
        argument.name: Given(argument.default, DEFAULT_ORIGIN)
        for argument in arguments
        if argument.default is not MISSING
    }
    given = dict(defaults)
    for layer in (
        from_file(arguments, place, path) if path else {},
        from_environment(arguments, place, environment),
        flags,
    ):
        for group in {a.option.alternative_to for a in arguments if a.name in layer} - {""}:
            members = [a for a in arguments if a.option.alternative_to == group]
            chosen = [f"{a.shown} ({layer[a.name].origin})" for a in members if a.name in layer]
            if len(chosen) > 1:
                raise ConfigurationError(f"give one of {' and '.join(chosen)}, not both")
            # One alternative replaces the others of what it wins over.
            given |= {a.name: defaults[a.name] for a in members}
        given |= layer
    return given


def shown_settings(arguments: Sequence[Argument], place: Place, given: Mapping[str, Given]) -> str:
    """Return all settings as the table of a settings file, each with what gave it."""
    lines = [place.table]
    for argument in arguments:
        setting = given.get(argument.name)
        if setting is None or setting.value is None:
            lines.append(f"# {argument.key}: {'not set' if setting else 'not given, and needed'}")
            continue
        value = setting.value != argument.default if argument.kind is bool else setting.value
        shown = '"..."' if argument.option.secret else _as_toml(value)
        lines.append(f"{argument.key} = {shown}  # {setting.origin}")
    return "\n".join(lines)


def with_origins(message: str, arguments: Sequence[Argument], given: Mapping[str, Given]) -> str:
    """Say of the flags that a message names where their values are really from."""
    named = [
        f"{argument.shown} is from {given[argument.name].origin}"
        for argument in arguments
        if given[argument.name].origin not in (argument.shown, DEFAULT_ORIGIN)
        and re.search(rf"(?<![\w-]){re.escape(argument.shown)}(?![\w-])", message)
    ]
    return "; ".join([message, *named])


def find_file(named: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the settings file to read: that of `--config`, else of the variable, else the default
    if there is one. Raises ConfigurationError for a named file that does not exist."""
    for source, name in (("--config", named), (CONFIG_VARIABLE, environment.get(CONFIG_VARIABLE))):
        if name:
            path = Path(name).expanduser()
            if not path.is_file():
                raise ConfigurationError(f"{source} {name}: there is no such file")
            return path
    path = default_file(environment)
    return path if path.is_file() else None


def _is_of_a_service(name: str, value: str) -> bool:
    """Tell whether a variable is what Kubernetes and Docker set for a service of our name: beside a
    service "dipaco-peer", DIPACO_PEER_PORT is tcp://10.0.0.1:31337."""
    of_service = r"_SERVICE_(HOST|PORT(_.*)?)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?"
    return re.match("(tcp|udp|sctp)://", value) is not None or bool(re.search(of_service, name))


def from_environment(
    arguments: Sequence[Argument], place: Place, environment: Mapping[str, str]
) -> dict[str, Given]:
    """Return the settings that variables give, by name of the field; an empty one gives nothing.

    Raises ConfigurationError for a value that cannot be, and for a variable of this place that no
    setting has.
    """
    known = {place.variable(argument.key): argument for argument in arguments}
    environment = {n: v for n, v in environment.items() if not _is_of_a_service(n, v)}
    if not place.is_shared:
        _refuse_unknown((n for n in environment if n.startswith(place.variable(""))), known, "")
    return {
        argument.name: Given(_from_text(argument, environment[name], name), name)
        for name, argument in known.items()
        if environment.get(name, "").strip()
    }


def from_file(arguments: Sequence[Argument], place: Place, path: Path) -> dict[str, Given]:
    """Return the settings that a file gives, by name of the field.

    Relative names of files are looked up beside it. Raises ConfigurationError for what is not
    TOML, for a value that cannot be, and for tables and keys that nobody reads.
    """
    table: Any = read_toml(path)
    _check_tables(table, place, path)
    for word in place.words:
        table = table.get(word, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {word} must be a table; write {place.table}")
    known = {argument.key: argument for argument in arguments}
    if not place.is_shared:
        _refuse_unknown(table, known, f"{path}: {place.table} ")
    return {
        argument.name: Given(_from_toml(argument, table[key], path, place), f"{path}")
        for key, argument in known.items()
        if key in table
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, also one from Windows. Raises ConfigurationError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(decoded(content))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def _check_tables(values: dict[str, Any], place: Place, path: Path) -> None:
    """Refuse what stands outside of the tables of our commands."""
    for key, value in values.items():
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{path}: {key} stands before the first table; settings are under the name of "
                f"their command, such as {place.table}"
            )
    others = set(values) - {place.words[0]}
    if others:
        _refuse_unknown(sorted(others), {*_program_names(), place.words[0]}, f"{path}: table ")


def _program_names() -> set[str]:
    """Return what our programs are called, without `dipaco-`."""
    try:
        entries = distribution("dipaco").entry_points
    except PackageNotFoundError:
        return set()
    return {entry.name.removeprefix("dipaco-") for entry in entries}


def _refuse_unknown(names: Iterable[str], known: Iterable[str], before: str) -> None:
    possible = sorted(known)
    for name in names:
        if name not in possible:
            guess = nearest_name(name, possible)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(possible)}"
            raise ConfigurationError(f"{before}{name} is unknown; {hint}")


def _from_toml(argument: Argument, value: Any, path: Path, place: Place) -> Any:
    where = f"{path}: {place.table} {argument.key}"
    if argument.takes_words:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigurationError(f"{where} must be a list of texts, not {value!r}")
        return tuple(words)
    if argument.kind is bool:
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where} must be true or false, not {value!r}")
        return value != argument.default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if argument.kind is float and is_number:
        return _checked(argument, float(value), where)
    if argument.kind is int and is_number and isinstance(value, int):
        return _checked(argument, value, where)
    if argument.kind in (int, float) or not isinstance(value, str):
        raise ConfigurationError(f"{where} must be {_wanted(argument)}, not {value!r}")
    found = _from_text(argument, value, where)
    return path.absolute().parent / found if isinstance(found, Path) else found


def _from_text(argument: Argument, text: str, where: str) -> Any:
    kind = argument.kind
    try:
        if argument.takes_words:
            return tuple(shlex.split(text))
        if kind is bool:
            return _SWITCHES[text.strip().lower()] != argument.default
        if kind is Path:
            return Path(text).expanduser()
        if get_origin(kind) is Literal:
            return {str(value): value for value in get_args(kind)}[text]
        return _checked(argument, kind(text), where)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{where} must be {_wanted(argument)}, not {text!r}") from None


def _checked(argument: Argument, value: Any, where: str) -> Any:
    argument.check(value, where)
    return value


def _wanted(argument: Argument) -> str:
    if get_origin(argument.kind) is Literal:
        return " or ".join(str(value) for value in get_args(argument.kind))
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(argument.kind, "a text")


def _as_toml(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = "".join(
        {"\\": "\\\\", '"': '\\"'}.get(c, c if c.isprintable() else f"\\u{ord(c):04x}")
        for c in str(value)
    )
    return f'"{escaped}"'


# -- parsers and their help: one page, or a short one and one with everything


def new_parser(
    name: str, description: str, epilog: str | None, arguments: Sequence[Argument] = ()
) -> argparse.ArgumentParser:
    """Return a parser to which nothing was added yet. Where some of the arguments to come are
    common, `--help` shows those alone, and `--help-all` all."""
    common = [argument for argument in arguments if argument.option.common]
    if common:
        return _with_two_helps(name, description, epilog, common)
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=epilog,
        # Examples keep their lines.
        formatter_class=(
            argparse.RawDescriptionHelpFormatter
            if "\n\n" in description
            else argparse.HelpFormatter
        ),
    )
    _add_version(parser)
    return parser


def _with_two_helps(
    name: str, description: str, epilog: str | None, common: Sequence[Argument]
) -> argparse.ArgumentParser:
    loose = [argument.option.metavar or "" for argument in common if argument.option.loose]
    parser = argparse.ArgumentParser(
        prog=name,
        usage=" ".join((name, "[options]", *loose)),
        description=description,
        epilog=epilog,
        add_help=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28),
    )
    parser.add_argument("-h", "--help", action=_ShortHelp, common=common, help="show this")
    parser.add_argument("--help-all", action="help", help="show all options")
    _add_version(parser)
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"dipaco {version('dipaco')}")


class _ShortHelp(argparse._HelpAction):
    """Shows what most people need."""

    def __init__(self, *, common: Sequence[Argument], **options: Any) -> None:
        super().__init__(**options)
        self._common = common

    def __call__(self, parser: argparse.ArgumentParser, *words: Any) -> None:
        short = _with_two_helps(parser.prog, parser.description or "", parser.epilog, self._common)
        for argument in self._common:
            if argument.option.loose:
                argument.add_loose_to(short)
            else:
                argument.add_to(short, None)
        short.print_help()
        parser.exit()
