"""The command line of every command, made from its settings.

    main = Command("dipaco-serve", ServeSettings, serve, "Serve a run.").main

A flag wins over one of the last time, and that over the default. Every command knows `--debug` and
`--version` beside its settings. Nothing large is imported here: `--help` and mistakes are answered
at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NoReturn, get_args, get_origin

from .errors import ConfigurationError, DipacoError, nearest_name, printable
from .files import tidy
from .output import outlast_audience
from .running import SettingsT, run_with_settings
from .settings import Argument, Typed, arguments_of


class LastTime(NamedTuple):
    """What a user typed of a command before."""

    file: Path
    """Where it is kept."""
    words: list[str]
    replaced: set[str]
    """Names of fields that they do not give any more."""


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

    last_time: Callable[[Mapping[str, Any]], LastTime] | None = None
    """Given what was typed, says what was typed before. Its settings have a field `typed` of the
    type `Typed`."""

    def parser(self, *, only_common: bool = False) -> _Parser:
        """Return the parser. The help of `only_common` is one page, where some options are."""
        has_common = any(argument.option.common for argument in arguments_of(self.settings))
        only_common &= has_common
        parser = _Parser(
            prog=self.name,
            usage=f"{self.name} [options] ADDR..." if only_common else None,
            description=self.description,
            epilog=self.epilog,
            # Examples keep their lines.
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter
                if "\n" in f"{self.description}{self.epilog}"
                else argparse.HelpFormatter,
                max_help_position=28,
            ),
        )
        if has_common:
            parser.add_argument("--help-all", action="help", help="show all options")
        _add_version(parser)
        self.add_to(parser, only_common=only_common)
        return parser

    def add_to(self, parser: argparse.ArgumentParser, *, only_common: bool = False) -> None:
        """Add the arguments to the parser of the command."""
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for argument in arguments_of(self.settings):
            group = "" if only_common else argument.group
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            _add(argument, groups[group], is_short=only_common)
        debug = argparse.SUPPRESS if only_common else "show tracebacks and debug messages"
        parser.add_argument("--debug", dest="_debug", action="store_true", help=debug)
        parser.set_defaults(_command=self, _parser=parser)

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the flags that were given, and nothing else. Raises SystemExit as argparse."""
        is_whole = "--help-all" in (sys.argv if words is None else words)
        return self.parser(only_common=not is_whole).parse_args(words)

    def flags(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return what was typed, by name of the field."""
        typed = {a.name: getattr(parsed, a.name, None) for a in arguments_of(self.settings)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in typed.items()
            if value is not None
        }

    def read(self, parsed: argparse.Namespace) -> SettingsT:
        """Return the settings. Raises ConfigurationError, and SystemExit as argparse does."""
        found, flags = arguments_of(self.settings), self.flags(parsed)
        last_file, last = self._last(flags)
        values = last | flags
        missing = [a for a in found if a.default is MISSING and a.name not in values]
        if missing:
            names = ", ".join(argument.shown for argument in missing)
            parsed._parser.error(f"the following arguments are required: {names}")
        if self.last_time is not None:
            values["typed"] = Typed(flags, {name: last[name] for name in last if name not in flags})
        try:
            return self.settings(**values)
        except DipacoError as error:
            kept = [a for a in found if a.name in last.keys() - flags.keys()]
            said = [a.shown for a in kept if _is_named(str(error), a, last[a.name])]
            hint = f" ({' and '.join(said)} stands in {last_file})" if said else ""
            raise type(error)(f"{error}{hint}") from None

    def _last(self, flags: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
        """Return what was typed before and still holds, and the file where it stands."""
        if self.last_time is None:
            return None, {}
        last = self.last_time(flags)
        parser = self.parser(only_common=True)
        parser.source = f"{last.file}: "  # What is wrong in it is said of it.
        kept = self.flags(parser.parse_args(last.words))
        return last.file, {name: kept[name] for name in kept.keys() - last.replaced}

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point of a program with this command alone. Returns the exit code."""
        return _run(lambda: self.parse(words))


@dataclass(frozen=True)
class Program:
    """A program with several commands, such as `dipaco-bootstrap`."""

    name: str
    description: str
    commands: tuple[Command[Any], ...]

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser."""
        # Examples keep their lines.
        parser = _Parser(
            prog=self.name,
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_version(parser)
        parsers = parser.add_subparsers(dest="command", required=True)
        for command in self.commands:
            added = parsers.add_parser(
                command.name, help=command.summary, description=command.description
            )
            command.add_to(added)
        return parser

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the flags that were given, and nothing else. Raises SystemExit as argparse."""
        return self.parser().parse_args(words)

    def main(self, words: Sequence[str] | None = None) -> int:
        """Entry point. Returns the exit code."""
        return _run(lambda: self.parse(words))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are like all others of a command: one line that says what to type."""

    source = ""
    """Where the words stand that it reads, if nobody has typed them now."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse a word that is not known here, where the flags of a program's command are known.

        Raises SystemExit.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(self._unknown(unknown[0]))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Write the message and end. Raises SystemExit."""
        help_flag = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        self._refuse(f"{message}; see {self.prog} {help_flag}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return (
                f"'{word}' is one word too many; put a text with spaces in quotes, and where a "
                "flag such as --initial-peers takes one word, give it again for the next"
            )
        flag = word.partition("=")[0]
        nearest = nearest_name(flag, self._option_string_actions)
        if nearest is None:
            self.error(f"there is no flag {flag}")
        return f"there is no flag {flag}; did you mean {nearest}?"

    def _refuse(self, message: str) -> NoReturn:
        self.exit(ConfigurationError.exit_code, f"error: {printable(self.source + message)}\n")


def _is_named(message: str, argument: Argument, value: Any) -> bool:
    """Tell whether a message speaks of an argument, or of the text that is its value."""
    texts = value if argument.takes_words else (value,)
    return bool(re.search(rf"(?<![\w-]){argument.shown}(?![\w-])", message)) or any(
        f"'{text}'" in message for text in texts
    )


def _run(parse: Callable[[], argparse.Namespace]) -> int:
    outlast_audience()
    # Python ends by looking for garbage among all objects of PyTorch: seconds on a busy machine,
    # in which a peer that has left seems to hang.
    atexit.register(gc.freeze)
    parsed = parse()
    command: Command[Any] = parsed._command
    return run_with_settings(lambda: command.read(parsed), command.run, debug=parsed._debug)


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"dipaco {version('dipaco')}")


def _add(argument: Argument, parser: argparse._ActionsContainer, *, is_short: bool) -> None:
    """Add an argument to a parser. What is not typed is not in the result: a file may give it.

    Where the help `is_short`, it has common options only.
    """
    option = argument.option
    keywords: dict[str, Any] = {
        "help": argparse.SUPPRESS if is_short and not option.common else argument.help,
        "default": argparse.SUPPRESS,
    }
    if argument.kind is bool:
        keywords["action"] = "store_false" if argument.default else "store_true"
    elif get_origin(argument.kind) is Literal:
        keywords |= {"choices": get_args(argument.kind), "metavar": option.metavar}
    else:
        keywords["metavar"] = option.metavar
        if argument.kind is Path:
            keywords["type"] = _path
        elif argument.kind in (int, float):
            keywords["type"] = argument.kind
        elif argument.takes_words:
            # A flag may be given again for more of them.
            keywords |= {"action": "extend", "nargs": 1 if option.one_by_one else "+"}
    if option.loose:
        parser.add_argument(argument.name, **(keywords | {"nargs": "*"}))
        if is_short:  # One way to give them is enough there.
            keywords["help"] = argparse.SUPPRESS
    if option.positional and argument.takes_words:
        parser.add_argument(argument.name, **(keywords | {"nargs": "+"}))
    elif option.positional:
        # argparse would make a value of the word that stands for none.
        parser.add_argument(argument.name, **(keywords | {"nargs": "?", "default": None}))
    else:
        parser.add_argument(argument.shown, dest=argument.name, **keywords)


def _path(word: str) -> Path:
    return Path(tidy(word))


# What argparse calls it in its messages.
_path.__name__ = Path.__name__
