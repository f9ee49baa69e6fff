"""The command line of every command, made from its settings, and how a command runs and ends.

What a command can be told is a frozen dataclass. Each field is annotated with an `Option`: what
it is for, and which values are possible. Parser, defaults, checks and messages follow from it:

    @dataclass(frozen=True, kw_only=True)
    class ServeSettings(Settings):
        port: Annotated[int, Option("TCP port to listen on", "PORT", least=0, most=65535)] = 31337

    main = Command("dipaco-serve", ServeSettings, serve, "Serve a run.").main

The same settings can be in a TOML file or in environment variables (`setting_sources`).

Nothing large is imported here: `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import FrameType, NoneType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args
from typing import get_type_hints as type_hints_of

from .errors import ConfigurationError, DipacoError, NetworkError, StorageError, printable
from .setting_sources import (
    CONFIG_VARIABLE,
    DEFAULT_ORIGIN,
    LOOSE,
    Argument,
    Given,
    Place,
    gather,
    new_parser,
    shown_settings,
    with_origins,
)
from .setting_sources import Option as Option  # the commands take it from here

# For the OpenMP that PyTorch brings: so many turns, some microseconds, then a thread that waits
# sleeps. Far fewer make a small model much slower on a quiet machine (benchmarks).
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "3000"
# In the stack wherever Python imports something.
IMPORTING = "<frozen importlib._bootstrap>"


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

    device: Annotated[str, Option("auto, cpu, cuda or cuda:N (also of ROCm), xpu, mps", "D")] = (
        "auto"
    )
    threads: Annotated[
        int | None, Option("CPU threads for arithmetic (default: all)", "N", least=1)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device("--device", self.device)


def check_device(flag: str, device: str) -> None:
    """Raise ConfigurationError if a flag gives something that cannot be a device."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device):
        raise ConfigurationError(
            f"{flag} '{device}' is not a device; give auto, cpu, cuda or cuda:0"
        )


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

    settings_of: str = ""
    """The program whose variables and table in a settings file it reads, if not its own."""

    def place(self, program: str = "") -> Place:
        """Return where its settings are, besides flags; `program` has it as one of several."""
        names = [program, self.name] if program else [self.settings_of or self.name]
        short = (name.split()[-1].rpartition(".")[2].removeprefix("dipaco-") for name in names)
        return Place(tuple(short), is_shared=bool(self.settings_of))

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser; a test freezes it."""
        parser = new_parser(self.name, self.description, self.epilog, arguments_of(self.settings))
        self.add_to(parser)
        return parser

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the flags that were given, and nothing else. Raises SystemExit as argparse."""
        return _only_given(self.parser()).parse_args(words)

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point of a program with this command alone. Returns the exit code."""
        return run_parsed(self.parse(words))

    def add_to(self, parser: argparse.ArgumentParser, program: str = "") -> None:
        """Add the arguments to the parser of the program or of the command."""
        found, place = arguments_of(self.settings), self.place(program)
        parser.add_argument(
            "--config",
            dest="_config",
            metavar="FILE",
            help=f"settings of {place.table} in a TOML file (default: "
            f"~/.config/dipaco/config.toml, if there is one) [{CONFIG_VARIABLE}]",
        )
        parser.add_argument(
            "--show-config",
            dest="_show_config",
            action="store_true",
            help="print all settings, and where each comes from, and do nothing else",
        )
        for argument in found:
            if argument.option.loose:
                argument.add_loose_to(parser)
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
            argument.add_to(groups[name], place, may_be_missing=may_be_missing)
        parser.set_defaults(_command=self, _parser=parser, _place=place)

    def given(
        self, parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ
    ) -> dict[str, Given]:
        """Return the settings by name of the field, each with what gave it; what must be given and
        is not is missing. Raises ConfigurationError for a variable, file or key that cannot be."""
        found = arguments_of(self.settings)
        flags, config = self._flags(found, parsed), getattr(parsed, "_config", None)
        return gather(found, parsed._place, flags, config, environment)

    def _flags(self, found: list[Argument], parsed: argparse.Namespace) -> dict[str, Given]:
        """Return what the flags give.

        The last positional may follow the addresses of an option, which takes all words it gets.
        """
        values = {a.name: getattr(parsed, a.name) for a in found if hasattr(parsed, a.name)}
        for argument in found:
            loose = getattr(parsed, LOOSE, None) if argument.option.loose else None
            if loose:
                values[argument.name] = [*loose, *values.get(argument.name, ())]
        many = [argument.name for argument in found if argument.takes_words]
        for argument in found:
            if not argument.option.positional or values.get(argument.name) is not None:
                continue
            values.pop(argument.name, None)
            holder = next(
                (n for n in many if values.get(n) and not is_address(values[n][-1])), None
            )
            if holder is not None:
                values[argument.name] = argument.kind(values[holder].pop())
        return {
            a.name: Given(
                tuple(values[a.name]) if isinstance(values[a.name], list) else values[a.name],
                a.shown,
            )
            for a in found
            if a.name in values
        }

    def read(
        self, parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ
    ) -> SettingsT:
        """Return the settings. Raises ConfigurationError, and SystemExit as argparse does."""
        found, given = arguments_of(self.settings), self.given(parsed, environment)
        missing = [argument.shown for argument in found if argument.name not in given]
        if missing:
            parsed._parser.error(f"the following arguments are required: {', '.join(missing)}")
        for name in dict.fromkeys(a.option.alternative_to for a in found):
            group = [a for a in found if name and a.option.alternative_to == name]
            if group and all(given[a.name].origin == DEFAULT_ORIGIN for a in group):
                shown = " ".join(a.shown for a in group)
                parsed._parser.error(f"one of the arguments {shown} is required")
        try:
            return self.settings(**{name: setting.value for name, setting in given.items()})
        except ConfigurationError as error:
            raise ConfigurationError(with_origins(str(error), found, given)) from None


@dataclass(frozen=True)
class Program:
    """A program with several commands, such as `dipaco-bootstrap`."""

    name: str
    description: str
    commands: tuple[Command[Any], ...]

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser; a test freezes it."""
        parser = new_parser(self.name, self.description, None)
        commands = parser.add_subparsers(dest="command", required=True)
        for command in self.commands:
            command.add_to(
                commands.add_parser(
                    command.name, help=command.summary, description=command.description
                ),
                self.name,
            )
        return parser

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the flags that were given, and nothing else. Raises SystemExit as argparse."""
        return _only_given(self.parser()).parse_args(words)

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point. Returns the exit code."""
        return run_parsed(self.parse(words))


def _only_given(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make a parser return only what was typed: variables and a file may give the rest."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _only_given(command)
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            action.required = False
            # A positional that is left out would be made of the word that stands for no value.
            action.default = argparse.SUPPRESS if action.option_strings else None
            if not action.option_strings and action.nargs is None:
                action.nargs = "?"
    for group in parser._mutually_exclusive_groups:
        group.required = False
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


def run_parsed(parsed: argparse.Namespace) -> int:
    """Run the command that was parsed and return its exit code."""
    command: Command[Any] = parsed._command
    found: list[Settings] = []
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Texts and names have characters that the terminal may lack.
        sys.stdout.reconfigure(errors="backslashreplace")

    def read() -> int:
        found.append(command.read(parsed))
        return 0

    def show() -> int:
        print(shown_settings(arguments_of(command.settings), parsed._place, command.given(parsed)))
        return 0

    with _interrupted_imports_end():
        is_shown = getattr(parsed, "_show_config", False)
        exit_code = run_command(show if is_shown else read, getattr(parsed, "debug", False))
        if is_shown or not found:
            return exit_code
        settings = found[0]
        quiet_threads()
        configure_logging(settings.debug)
        return run_command(lambda: int(command.run(settings)), settings.debug)


@contextlib.contextmanager
def _interrupted_imports_end() -> Iterator[None]:
    """Let Ctrl+C end the process at once where something is being imported, with exit code 130.

    Importing PyTorch and Hivemind takes seconds, and much of what runs in them catches everything:
    the exception is lost there, and the command goes on as if nobody had pressed a key.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        here = frame
        while here is not None:
            if here.f_code.co_filename == IMPORTING:
                os._exit(128 + number)
            here = here.f_back
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        # A command may have installed its own, and goes by that until its process ends.
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def quiet_threads() -> None:
    """Let PyTorch's threads sleep when they wait for each other, before PyTorch is imported.

    By themselves they turn in circles for milliseconds. Where another program has one of the cores
    they use up the time in which the thread could run that all wait for, and a step takes many
    times as long. Variables that are set already stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)


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
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("dipaco")
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    ours.handlers = [handler]
    for noisy in ("asyncio", "hivemind"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if debug else logging.CRITICAL)


class _PrintableFormatter(logging.Formatter):
    """One line for a message; a traceback stays as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


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
            print(f"error: {printable(' '.join(line.split()))}", file=sys.stderr)
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
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # None where it was closed at the start.
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Python flushes again on exit, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True
