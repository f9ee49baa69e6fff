"""Parsers of commands, and their help: one page, or a short one and one with everything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from .setting_sources import Argument


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
