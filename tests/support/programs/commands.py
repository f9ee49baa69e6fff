"""All commands of the project, from the scripts that it installs."""

import argparse
import importlib
import tomllib
from pathlib import Path

from dipaco.base.command_line import Command, Program
from dipaco.peer import pause_command

ROOT = Path(__file__).resolve().parents[3]
# Name to module.
SCRIPTS = {
    name: target.removesuffix(":main")
    for name, target in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
}


def program_of(module):
    return importlib.import_module(module).COMMAND


def commands():
    """Yield every command: what is typed, and the command."""
    programs = [program_of(module) for module in SCRIPTS.values()]
    for program in [*programs, *pause_command.COMMANDS.values()]:
        if isinstance(program, Command):
            yield program.name, program
            continue
        for command in program.commands:
            yield f"{program.name} {command.name}", command


def parsers():
    """Return the parser that reads the words of every command, by what is typed.

    A program with several commands is there too, before them.
    """
    found = {}
    for program in [*map(program_of, SCRIPTS.values()), *pause_command.COMMANDS.values()]:
        parser = found[program.name] = program.parser()
        if isinstance(program, Program):
            [several] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            found |= {f"{program.name} {name}": each for name, each in several.choices.items()}
    return found


def options_of(parser):
    return {option for action in parser._actions for option in action.option_strings}
