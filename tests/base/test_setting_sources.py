"""Settings from a file and from variables: who wins, and what is said of mistakes."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from support.commands import commands, parsers

from dipaco.base.command_line import Argument, Command, Option, Settings, arguments_of
from dipaco.base.errors import ConfigurationError
from dipaco.base.setting_sources import Place, default_file, gather, shown_settings
from dipaco.peer.owner import control_cli


@dataclass(frozen=True, kw_only=True)
class ToySettings(Settings):
    """One setting of every kind."""

    peers: Annotated[tuple[str, ...], Option("whom to call", "ADDR")]
    port: Annotated[int, Option("where", "PORT", least=0, most=65535)] = 31337
    limit_mbps: Annotated[float | None, Option("how fast", "MBPS", least=0.1)] = None
    kind: Annotated[Literal["big", "small"], Option("which")] = "big"
    folder: Annotated[Path, Option("whither", "DIR", flag="--cache-dir")] = Path("here")
    compiled: Annotated[bool, Option("do not compile", flag="--no-compile")] = True
    key: Annotated[str | None, Option("a secret", "KEY", secret=True)] = None
    one: Annotated[str | None, Option("one way", "A", alternative_to="way")] = None
    other: Annotated[str | None, Option("another", "B", alternative_to="way")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port == 1:
            raise ConfigurationError("--port 1 is taken")


COMMAND = Command("dipaco-toy", ToySettings, lambda settings: 0, "A toy.")
NEEDED = ["--peers", "a", "--one", "x"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def read(words: list[str], environment: dict[str, str] | None = None) -> ToySettings:
    variables = {"XDG_CONFIG_HOME": "/nowhere", **(environment or {})}
    return COMMAND.read(COMMAND.parse(words), variables)


def from_file(config: Path, text: str, words: list[str] | None = None) -> ToySettings:
    config.write_text(f"[toy]\n{text}", encoding="utf-8")
    return read([*(NEEDED if words is None else words), "--config", str(config)])


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(config: Path) -> None:
    config.write_text('[toy]\nport = 1000\nkind = "small"\nlimit_mbps = 5')
    settings = read(
        [*NEEDED, "--config", str(config), "--port", "3000"],
        {"DIPACO_TOY_PORT": "2000", "DIPACO_TOY_LIMIT_MBPS": "7.5"},
    )
    assert (settings.port, settings.limit_mbps, settings.kind) == (3000, 7.5, "small")
    assert (settings.folder, settings.compiled) == (Path("here"), True)


def test_a_file_gives_every_kind_of_setting(config: Path) -> None:
    settings = from_file(
        config,
        'peers = ["a", "b"]\nport = 0\nlimit_mbps = 2\nkind = "small"\ncache_dir = "cache"\n'
        'no_compile = true\nother = "y"\n',
        [],
    )
    assert settings == ToySettings(
        peers=("a", "b"), port=0, limit_mbps=2.0, kind="small", compiled=False, other="y",
        folder=config.parent / "cache",
    )  # fmt: skip


def test_variables_give_every_kind_of_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = {
        "PEERS": "a 'b c'", "PORT": "0", "LIMIT_MBPS": "2", "KIND": "small", "NO_COMPILE": "yes",
        "CACHE_DIR": "~/cache", "OTHER": "y", "KEY": "", "DEBUG": "0",
    }  # fmt: skip
    settings = read([], {f"DIPACO_TOY_{name}": value for name, value in values.items()})
    assert settings == ToySettings(
        peers=("a", "b c"), port=0, limit_mbps=2.0, kind="small", compiled=False, other="y",
        folder=Path("/home/me/cache"),
    )  # fmt: skip


def test_the_default_file_is_read_if_there_is_one(tmp_path: Path) -> None:
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


def test_one_alternative_replaces_that_of_the_file(config: Path) -> None:
    assert from_file(config, 'other = "y"', NEEDED).other is None
    assert from_file(config, 'other = "y"', ["--peers", "a"]).other == "y"
    with pytest.raises(ConfigurationError, match=r"give one of --one \(.*\) and --other"):
        from_file(config, 'other = "y"\none = "x"', ["--peers", "a"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 5", "{file}: [toy] prot is unknown; did you mean port?"),
        ("port = '5'", "{file}: [toy] port must be a whole number, not '5'"),
        ("port = true", "{file}: [toy] port must be a whole number, not True"),
        ("port = 70000", "{file}: [toy] port 70000 must be 0 to 65535"),
        ("port = 1", "--port 1 is taken; --port is from {file}"),
        ("limit_mbps = nan", "{file}: [toy] limit_mbps nan must be a finite number"),
        ("no_compile = 1", "{file}: [toy] no_compile must be true or false, not 1"),
        ("cache_dir = 1", "{file}: [toy] cache_dir must be a text, not 1"),
        ("kind = 'tiny'", "{file}: [toy] kind must be big or small, not 'tiny'"),
        ("peers = [1]", "{file}: [toy] peers must be a list of texts, not [1]"),
        ("port = ", "{file} is not TOML: "),
        ("[tooy]\nport = 1", "{file}: table tooy is unknown; did you mean toy?"),
    ],
)
def test_mistakes_in_a_file_are_said_in_a_line(config: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        from_file(config, text)
    assert str(raised.value).startswith(said.format(file=config))
    assert "\n" not in str(raised.value)


def test_settings_outside_of_tables_are_refused(config: Path) -> None:
    config.write_text("port = 1")
    with pytest.raises(ConfigurationError, match=r"port stands before .* such as \[toy\]"):
        read([*NEEDED, "--config", str(config)])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DIPACO_TOY_PROT", "5", "DIPACO_TOY_PROT is unknown; did you mean DIPACO_TOY_PORT?"),
        ("DIPACO_TOY_PORT", "x", "DIPACO_TOY_PORT must be a whole number, not 'x'"),
        ("DIPACO_TOY_PORT", "-1", "DIPACO_TOY_PORT -1 must be 0 to 65535"),
        ("DIPACO_TOY_PORT", "1", "--port 1 is taken; --port is from DIPACO_TOY_PORT"),
        ("DIPACO_TOY_DEBUG", "perhaps", "DIPACO_TOY_DEBUG must be true or false, not 'perhaps'"),
        ("DIPACO_CONFIG", "/none.toml", "DIPACO_CONFIG /none.toml: there is no such file"),
    ],
)
def test_mistakes_in_variables_are_said_in_a_line(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read(NEEDED, {name: value})
    assert str(raised.value) == said


def test_what_is_needed_may_come_from_anywhere_but_must_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read([], {"DIPACO_TOY_PEERS": "a", "DIPACO_TOY_ONE": "x"}).peers == ("a",)
    for environment, said in (
        ({"DIPACO_TOY_ONE": "x"}, "the following arguments are required: --peers"),
        ({"DIPACO_TOY_PEERS": "x"}, "one of the arguments --one --other is required"),
    ):
        with pytest.raises(SystemExit):
            read([], environment)
        assert said in capsys.readouterr().err


def test_pause_reads_where_the_peer_does() -> None:
    command = control_cli.COMMANDS["pause"]
    environment = {"DIPACO_PEER_CACHE_DIR": "/volume", "DIPACO_PEER_INITIAL_PEERS": "/ip4/1.2.3.4"}
    settings = command.read(command.parse([]), {"XDG_CONFIG_HOME": "/nowhere", **environment})
    assert settings.cache_folder == Path("/volume")


def test_what_is_shown_is_a_file_that_gives_the_same(config: Path) -> None:
    words = ["--port", "7", "--key", "hush", "--peers", 'a"\\', "\u00e9\n"]
    parsed = COMMAND.parse(words)
    given = COMMAND.given(parsed, {"XDG_CONFIG_HOME": "/nowhere", "DIPACO_TOY_OTHER": "y"})
    shown = shown_settings(arguments_of(ToySettings), parsed._place, given)
    assert "port = 7  # --port\n" in shown
    assert 'other = "y"  # DIPACO_TOY_OTHER\n' in shown
    assert "# limit_mbps: not set\n" in shown
    assert "hush" not in shown
    again = from_file(config, shown.removeprefix("[toy]\n"), [])
    assert again.peers == ('a"\\', "\u00e9\n")
    assert (again.port, again.other, again.key) == (7, "y", "...")


def example(argument: Argument) -> Any:
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


@pytest.mark.parametrize("found", commands(), ids=lambda found: found[0])
def test_every_setting_of_every_command_can_be_in_a_file_and_in_a_variable(
    found: tuple[str, Command[Any], Place], config: Path
) -> None:
    """And each has a name of its own, which the help shows."""
    name, command, place = found
    arguments = arguments_of(command.settings)
    shown = " ".join(parsers()[name].format_help().split())
    assert len({argument.key for argument in arguments}) == len(arguments)
    for argument in arguments:
        value = example(argument)
        config.write_text(f"[{'.'.join(place.words)}]\n{argument.key} = {toml(value)}")
        assert tomllib.loads(config.read_text())
        text = " ".join(value) if isinstance(value, list) else str(value).lower()
        variable = place.variable(argument.key)
        both = [
            gather([argument], place, {}, str(config), {}),
            gather([argument], place, {}, None, {"XDG_CONFIG_HOME": "/-", variable: text}),
        ]
        values = [given[argument.name].value for given in both]
        if argument.kind is Path:
            values[0] = values[0].relative_to(config.parent)
        assert values[0] == values[1]
        assert values[0] != argument.default or argument.default is MISSING
        assert variable in shown


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def test_what_an_orchestrator_sets_for_a_service_of_our_name_is_no_setting() -> None:
    """Beside a service "dipaco-toy" every container has these."""
    found = read(
        NEEDED,
        {
            "DIPACO_TOY_SERVICE_HOST": "10.0.0.1",
            "DIPACO_TOY_SERVICE_PORT": "31337",
            "DIPACO_TOY_SERVICE_PORT_P2P": "31337",
            "DIPACO_TOY_PORT": "tcp://10.0.0.1:31337",
            "DIPACO_TOY_PORT_31337_TCP": "tcp://10.0.0.1:31337",
            "DIPACO_TOY_PORT_31337_TCP_ADDR": "10.0.0.1",
            "DIPACO_TOY_KIND": "small",
        },
    )
    assert (found.kind, found.port) == ("small", 31337)


def test_a_user_without_a_name_and_a_home_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert default_file({}) == Path("/.config/dipaco/config.toml")
    parsers()
