"""The command line of every command, made from its settings, and how a command runs and ends.

What a command can be told is a frozen dataclass. Each field is annotated with an `Option`: what
it is for, and which values are possible. Parser, defaults, checks and messages follow from it:

    @dataclass(frozen=True, kw_only=True)
    class ServeSettings(Settings):
        port: Annotated[int, Option("TCP port to listen on", "PORT", least=0, most=65535)] = 31337

    main = Command("dipaco-serve", ServeSettings, serve, "Serve a run.").main

Nothing large is imported here: `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from importlib.metadata import version
from types import NoneType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin
from typing import get_type_hints as type_hints_of

from .errors import ConfigurationError, DipacoError, NetworkError, StorageError


@dataclass(frozen=True)
class Option:
    """How a field of settings is given on the command line.

    A flag is the field's name with hyphens unless `flag` says otherwise; `positional` arguments
    have none, and are named by `metavar`. `least` and `most` bound a number. Of the fields with
    one `alternative_to`, exactly one must be given.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    least: float | None = None
    most: float | None = None
    positional: bool = False
    alternative_to: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every command can be told. Values that cannot be raise ConfigurationError."""

    group: ClassVar[str] = ""
    """Heading in the help for the fields of a class."""

    debug: Annotated[bool, Option("tracebacks and debug messages")] = False

    def __post_init__(self) -> None:
        for argument in arguments_of(type(self)):
            argument.check(getattr(self, argument.name))


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Which run of a swarm is meant."""

    run: Annotated[
        str | None, Option("run id, its beginning, or its name (if there are several)", "RUN")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """Where a command computes; `dipaco.modules.device` acts on it."""

    group = "computing"

    device: Annotated[str, Option("auto, cpu, cuda or cuda:N", "D")] = "auto"
    threads: Annotated[
        int | None, Option("CPU threads for arithmetic (default: all)", "N", least=1)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigurationError(
                f"--device '{self.device}' is not a device; give auto, cpu, cuda or cuda:0"
            )


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
        if default in (MISSING, None, ()) or self.kind is bool or "default" in self.option.help:
            return self.option.help
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{self.option.help} (default: {shown})"

    def check(self, value: Any) -> None:
        """Raise ConfigurationError, naming the flag, for a number out of bounds."""
        if self.kind not in (int, float) or value is None:
            return
        least, most = self.option.least, self.option.most
        if not math.isfinite(value):
            raise ConfigurationError(f"{self.shown} {value} must be a finite number")
        if (least is None or value >= least) and (most is None or value <= most):
            return
        bounds = f"at least {least:g}" if most is None else f"{least or 0:g} to {most:g}"
        raise ConfigurationError(f"{self.shown} {value} must be {bounds}")

    def add_to(self, parser: argparse._ActionsContainer, *, may_be_missing: bool = False) -> None:
        """Add it to a parser."""
        keywords: dict[str, Any] = {"help": self.help}
        if self.kind is bool:
            action = "store_false" if self.default else "store_true"
            parser.add_argument(self.shown, dest=self.name, action=action, **keywords)
            return
        if self.option.metavar:
            keywords["metavar"] = self.option.metavar
        if get_origin(self.kind) is Literal:
            keywords["choices"] = get_args(self.kind)
        elif self.takes_words:
            keywords["nargs"] = "+"
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


def arguments_of(settings: type[Settings]) -> list[Argument]:
    """Return all fields of settings: the group that must be given first, then a class's own
    before those of its bases. The one place that knows every setting of a command."""
    hints = type_hints_of(settings, include_extras=True)
    classes = [base for base in settings.__mro__ if issubclass(base, Settings)]
    found = []
    for field in fields(settings):
        # A field that is written again, with another default, stays in the group of the first.
        owner = [c for c in classes if field.name in vars(c).get("__annotations__", {})][-1]
        annotation, option = get_args(hints[field.name])
        kinds = get_args(annotation)
        kind = kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else annotation
        argument = Argument(field, option, kind, vars(owner).get("group", ""))
        found.append((classes.index(owner), argument))
    needed = {place for place, argument in found if argument.default is MISSING}
    found.sort(key=lambda pair: (pair[0] not in needed, pair[0]))
    return [argument for _, argument in found]


SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True)
class Command(Generic[SettingsT]):
    """A command: its name, what it can be told, and what it does, which returns the exit code."""

    name: str
    settings: type[SettingsT]
    run: Callable[[SettingsT], int]
    description: str
    epilog: str | None = None
    summary: str = ""
    """Its line in the help of a program with several commands."""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser; a test freezes it."""
        parser = _new_parser(self.name, self.description, self.epilog)
        self.add_to(parser)
        return parser

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point of a program with this command alone. Returns the exit code."""
        return run_parsed(self.parser().parse_args(words))

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments to the parser of the program or of the command."""
        found = arguments_of(self.settings)
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        may_be_missing = any(argument.takes_words for argument in found)
        for argument in found:
            alternatives = argument.option.alternative_to
            name = alternatives or argument.group
            if name not in groups:
                groups[name] = (
                    parser.add_mutually_exclusive_group(required=True)
                    if alternatives
                    else parser.add_argument_group(name)
                )
            argument.add_to(groups[name], may_be_missing=may_be_missing)
        parser.set_defaults(_command=self, _parser=parser)

    def values(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return what was parsed as values of the settings' fields.

        The last positional may follow the addresses of an option, which takes all words it gets.
        """
        found = arguments_of(self.settings)
        values = {argument.name: getattr(parsed, argument.name) for argument in found}
        many = [argument.name for argument in found if argument.takes_words]
        for argument in found:
            if not argument.option.positional or values[argument.name] is not None:
                continue
            holder = next((n for n in many if values[n] and not is_address(values[n][-1])), None)
            if holder is not None:
                values[argument.name] = argument.kind(values[holder].pop())
            else:
                parsed._parser.error(f"the following arguments are required: {argument.shown}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Program:
    """A program with several commands, such as `dipaco-bootstrap`."""

    name: str
    description: str
    commands: tuple[Command[Any], ...]

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser; a test freezes it."""
        parser = _new_parser(self.name, self.description, None)
        commands = parser.add_subparsers(dest="command", required=True)
        for command in self.commands:
            command.add_to(
                commands.add_parser(
                    command.name, help=command.summary, description=command.description
                )
            )
        return parser

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point. Returns the exit code."""
        return run_parsed(self.parser().parse_args(words))


def _new_parser(name: str, description: str, epilog: str | None) -> argparse.ArgumentParser:
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
    parser.add_argument("--version", action="version", version=f"dipaco {version('dipaco')}")
    return parser


def is_address(word: str) -> bool:
    """Tell a multiaddress from a path or a text, which may begin with a slash as well."""
    return re.match(r"/(ip4|ip6|dns|dns4|dns6|dnsaddr)/", word) is not None


def shown_bytes(count: int) -> str:
    """Return a count of bytes in decimal units, three digits."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Return the settings that were parsed. Raises ConfigurationError, and SystemExit as argparse
    does."""
    command: Command[Any] = parsed._command
    settings: Settings = command.settings(**command.values(parsed))
    return settings


def run_parsed(parsed: argparse.Namespace) -> int:
    """Run the command that was parsed and return its exit code."""
    configure_logging(parsed.debug)
    return run_command(lambda: int(parsed._command.run(settings_of(parsed))), parsed.debug)


def configure_logging(debug: bool) -> None:
    """Set up logging before Hivemind is imported: our own one-line messages.

    Hivemind installs a handler of its own and prints tracebacks of failures that we handle; a
    user sees our one line, and all of it with `--debug`.
    """
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if debug else "CRITICAL")
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "debug" if debug else "fatal")
    if not debug:
        warnings.filterwarnings("ignore", module=r"hivemind\.")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("dipaco")
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    ours.handlers = [handler]
    for noisy in ("asyncio", "hivemind"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if debug else logging.CRITICAL)


def run_command(main: Callable[[], int], debug: bool) -> int:
    """Run a command's body and turn its errors into one line and an exit code.

    `KeyboardInterrupt` gives 130. With `debug` the traceback is shown too.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        exit_code, line = _explain(error)
        if line:
            print(f"error: {' '.join(line.split())}", file=sys.stderr)
        return exit_code


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the one line of an error that ends a command."""
    if isinstance(error, DipacoError):
        return error.exit_code, str(error)
    if isinstance(error, BrokenPipeError) and _reader_left():
        return 1, ""
    if isinstance(error, ConnectionError):
        return NetworkError.exit_code, f"the network layer broke off ({error}); start again"
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename else ""
        return StorageError.exit_code, f"{where}{reason}; free space, or give another folder"
    return DipacoError.exit_code, (
        f"unexpected {type(error).__name__}: {error}; give --debug for the traceback and report it"
    )


def _reader_left() -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as with `| head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again on exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    except (OSError, ValueError):
        pass
    return False
