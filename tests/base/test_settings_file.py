"""Settings from flags and a file: which wins, and what is said of mistakes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest

from dipaco.base.command_line import Command, Program
from dipaco.base.errors import ConfigurationError
from dipaco.base.settings import Option, Settings, arguments_of
from dipaco.base.settings_file import CONFIG_VARIABLE, default_file, read_settings
from dipaco.peer import pause_command
from dipaco.peer.peer_settings import default_cache_folder
from support.programs.commands import commands, parsers


@dataclass(frozen=True, kw_only=True)
class ToySettings(Settings):
    """One setting of every kind."""

    peers: Annotated[tuple[str, ...], Option("whom to call", "ADDR")]
    port: Annotated[int, Option("where", "PORT", least=0, most=65535)] = 31337
    limit_mbps: Annotated[float | None, Option("how fast", "MBPS", least=0.1)] = None
    kind: Annotated[Literal["big", "small"], Option("which")] = "big"
    folder: Annotated[Path, Option("whither", "DIR", flag="--cache-dir")] = Path("here")
    compiled: Annotated[bool, Option("do not compile", flag="--no-compile")] = True

    def __post_init__(self):
        super().__post_init__()
        if self.port == 1:
            raise ConfigurationError("--port 1 is taken")


COMMAND = Command("dipaco-toy", ToySettings, lambda settings: 0, "A toy.")
NEEDED = ["--peers", "a"]


@pytest.fixture
def config(tmp_path):
    return tmp_path / "config.toml"


def read(words, environment=None):
    variables = {"XDG_CONFIG_HOME": "/nowhere", **(environment or {})}
    return COMMAND.read(COMMAND.parse(words), variables)


def from_file(config, text, words=None):
    config.write_text(f"[toy]\n{text}", encoding="utf-8")
    return read([*(NEEDED if words is None else words), "--config", str(config)])


def test_a_flag_wins_over_the_file_over_the_default(config):
    settings = from_file(config, 'port = 1000\nkind = "small"', [*NEEDED, "--port", "3000"])
    assert (settings.port, settings.kind) == (3000, "small")
    assert (settings.folder, settings.compiled) == (Path("here"), True)


def test_a_file_gives_every_kind_of_setting(config):
    text = 'peers = ["a", "b"]\nport = 0\nlimit_mbps = 2\nkind = "small"\ncache_dir = "cache"\n'
    assert from_file(config, text + "no_compile = true", []) == ToySettings(
        peers=("a", "b"), port=0, limit_mbps=2.0, kind="small", compiled=False,
        folder=config.parent / "cache",
    )  # fmt: skip


def test_the_home_folder_may_be_meant(config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert from_file(config, 'cache_dir = "~/cache"').folder == Path("/home/me/cache")


@pytest.mark.parametrize("value", ['"/data"', "'/data'", "/data\r", " /data \n", '" /data"\r\n'])
def test_quotes_and_white_space_around_a_folder_are_no_part_of_it(config, value, monkeypatch):
    assert from_file(config, f"cache_dir = {json.dumps(value)}").folder == Path("/data")
    assert read([*NEEDED, "--cache-dir", value]).folder == Path("/data")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_cache_folder() == Path("/data/dipaco")
    config.write_text("[toy]\nport = 7\n")
    named = value.replace("/data", str(config))
    assert read(NEEDED, {CONFIG_VARIABLE: named}).port == 7
    assert default_file({"XDG_CONFIG_HOME": value}).is_relative_to("/data/dipaco")


def test_the_default_file_is_read_if_there_is_one(tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = default_file(environment)
    assert path == tmp_path / "dipaco" / "config.toml"
    assert read(NEEDED, environment).port == 31337
    path.parent.mkdir()
    path.write_text("[toy]\nport = 5\n")
    assert read(NEEDED, environment).port == 5
    named = tmp_path / "other.toml"
    named.write_text("[toy]\nport = 6\n")
    assert read(NEEDED, {**environment, "DIPACO_CONFIG": str(named)}).port == 6
    with pytest.raises(ConfigurationError, match=r"DIPACO_CONFIG /none: there is no such file"):
        read(NEEDED, {"DIPACO_CONFIG": "/none"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 5", "{file}: [toy] prot is unknown; did you mean port?"),
        ("port = '5'", "{file}: [toy] port must be a whole number, not '5'"),
        ("port = true", "{file}: [toy] port must be a whole number, not True"),
        ("port = 70000", "--port 70000 must be 0 to 65535 (--port stands in {file})"),
        ("port = 1", "--port 1 is taken (--port stands in {file})"),
        ("limit_mbps = nan", "--limit-mbps nan must be a finite number (--limit-mbps stands in"),
        ("no_compile = 1", "{file}: [toy] no_compile must be true or false, not 1"),
        ("cache_dir = 1", "{file}: [toy] cache_dir must be a text, not 1"),
        ("kind = 'tiny'", "{file}: [toy] kind must be big or small, not 'tiny'"),
        ("peers = [1]", "{file}: [toy] peers must be a list of texts, not [1]"),
        ("port = ", "{file} is not TOML: "),
        ("[tooy]\nport = 1", "{file}: table tooy is unknown; did you mean toy?"),
    ],
)
def test_mistakes_in_a_file_are_said_in_a_line(config, text, said):
    with pytest.raises(ConfigurationError) as raised:
        from_file(config, text)
    assert str(raised.value).startswith(said.format(file=config))
    assert "\n" not in str(raised.value)


def test_a_flag_that_is_wrong_is_not_looked_for_in_the_file(config):
    with pytest.raises(ConfigurationError, match="--port 1 is taken$"):
        from_file(config, "port = 5", [*NEEDED, "--port", "1"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1", r"port stands in no table of a command; write it under \[toys.play\]"),
        ("[toys]\nport = 1", r"port stands in no table of a command; write it under \[toys.play\]"),
        ("[toys.paly]", "table paly is unknown; did you mean play?"),
        ("[toys.rest]\nport = 'of another command'", ""),
    ],
)
def test_tables_that_no_command_reads_are_refused(config, text, said):
    config.write_text(text)
    commands = [Command(name, ToySettings, lambda settings: 0, "") for name in ("play", "rest")]
    program = Program("dipaco-toys", "Toys.", tuple(commands))
    parsed = program.parse(["play", *NEEDED, "--config", str(config)])
    if said:
        with pytest.raises(ConfigurationError, match=said):
            commands[0].read(parsed)
    else:
        assert commands[0].read(parsed).port == 31337


def test_what_is_needed_may_come_from_the_file_but_must_come(config, capsys):
    assert from_file(config, 'peers = "a"', []).peers == ("a",)
    with pytest.raises(SystemExit):
        from_file(config, "", [])
    assert "the following arguments are required: --peers" in capsys.readouterr().err


def test_pause_reads_where_the_peer_does(config):
    config.write_text('[peer]\ncache_dir = "/volume"\ninitial_peers = ["/ip4/1.2.3.4"]')
    command = pause_command.COMMANDS["pause"]
    assert command.read(command.parse(["--config", str(config)])).cache_folder == Path("/volume")


def example(argument):
    """Return a value of a setting that is not its default, as a file would have it."""
    if argument.takes_words:
        return ["/ip4/203.0.113.5/tcp/1"]
    if argument.kind is bool:
        return True
    if get_origin(argument.kind) is Literal:
        return next(value for value in get_args(argument.kind) if value != argument.default)
    if argument.kind in (int, float):
        value = max(2, int(argument.option.least or 0) + 1)
        return value if value != argument.default else value + 1
    return "some-text"


def test_every_setting_of_every_command_can_be_in_a_file(config):
    """And each has a name of its own."""
    for _, command, table in commands():
        arguments = arguments_of(command.settings)
        values = {argument.key: example(argument) for argument in arguments}
        assert len(values) == len(arguments)
        lines = [f"{k} = {str(v).lower() if v is True else repr(v)}" for k, v in values.items()]
        config.write_text("\n".join([f"[{'.'.join(table)}]", *lines]))
        found = read_settings(config, table, arguments, commands=table[1:])
        assert [found[a.name] == a.default for a in arguments] == [False] * len(arguments)


def test_a_user_without_a_name_and_a_home_has_defaults(monkeypatch):
    """As in a container that runs under a number."""

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert default_file({}) == Path("/.config/dipaco/config.toml")
    parsers()
