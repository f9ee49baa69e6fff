"""`--install-service`."""

import configparser
import re
import shutil
from pathlib import Path

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.peer import peer_command, service_unit
from dipaco.peer.service_unit import FLAG, install_service, unit
from support.programs.processes import ran

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with systemd, and a home."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "root/run/systemd/system").mkdir(parents=True)
    return tmp_path / "root"


def settings_of(text):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    return parser


def test_the_unit_starts_the_command_that_was_typed(root, tmp_path):
    words = [ADDRESS, FLAG, "--name", "kitchen laptop", "--max-upload-mbps", "5"]
    said = install_service(words, {"HF_HOME": "/data/hf", "PATH": "/bin", "TERM": "x"}, root)
    file = tmp_path / "config/systemd/user/dipaco-peer.service"
    assert str(file) in said
    assert "journalctl --user -u dipaco-peer -f" in said
    service = settings_of(file.read_text())["Service"]
    start = service["ExecStart"]
    assert start.startswith("/")
    assert start.endswith(f'{ADDRESS} --name "kitchen laptop" --max-upload-mbps 5')
    assert FLAG not in start
    lines = file.read_text().splitlines()
    # Programs such as nvidia-smi are found as in the terminal.
    assert [line for line in lines if line.startswith("Environment=")] == [
        "Environment=PATH=/bin",
        "Environment=HF_HOME=/data/hf",
    ]
    assert service["WorkingDirectory"] == str(Path.cwd())
    # Again, with other words: the last ones count.
    install_service([ADDRESS, FLAG[:7]], {}, root)
    assert file.read_text().count("ExecStart=") == 1
    assert file.read_text().count(FLAG[:7]) == 1  # In its first line.
    assert "kitchen" not in file.read_text()


def test_others_on_the_machine_read_no_invitation(root, tmp_path):
    install_service([ADDRESS, "--invitation", "dipaco-invitation-x", FLAG], {}, root)
    file = tmp_path / "config/systemd/user/dipaco-peer.service"
    assert file.stat().st_mode & 0o077 == 0


def test_both_units_end_with_the_same_codes_and_in_the_same_way():
    ours = settings_of(unit(["dipaco-peer"], {}, Path("/")))["Service"]
    systems = settings_of((ROOT / "examples/deploy/dipaco-peer.service").read_text())["Service"]
    for key in ("KillSignal", "KillMode", "TimeoutStopSec", "Restart", "RestartSec", "LimitNOFILE"):
        assert ours[key] == systems[key]
    assert ours["RestartPreventExitStatus"] == systems["RestartPreventExitStatus"]


def test_systemd_reads_the_unit(tmp_path):
    """Also words that it would take for its own."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("this machine has no systemd-analyze")
    words = ["/bin/true", "50%", "$HOME", 'a "b" c', "back\\slash", "", "it's; so"]
    file = tmp_path / "dipaco-peer.service"
    file.write_text(unit(words, {"XDG_CACHE_HOME": "/a b/50%"}, tmp_path))
    done = ran(analyze, "verify", "--man=no", file)
    complaints = [line for line in done.stderr.splitlines() if "dipaco-peer" in line]
    assert complaints == []
    [start] = re.findall(r"^ExecStart=(.*)$", file.read_text(), re.M)
    assert start == ('/bin/true 50%% $$HOME "a \\"b\\" c" "back\\\\slash" "" "it\'s; so"')


def test_without_systemd_the_command_says_what_else_to_do(tmp_path, capsys, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"does not run systemd; .*tmux"):
        install_service([ADDRESS, FLAG], {}, tmp_path)
    monkeypatch.setattr(peer_command, "install_service", lambda words: " ".join(words))
    assert peer_command.main([ADDRESS, FLAG, "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{ADDRESS} {FLAG} --cache-dir {tmp_path}\n"
    # Nothing is installed that could not start.
    assert peer_command.main([FLAG, "--cache-dir", str(tmp_path)]) == 3
    for words in (["--hours", "night"], ["--metrics", "nowhere"], ["--check"]):
        assert peer_command.main([ADDRESS, FLAG, *words]) == 3


def test_a_program_of_this_environment_is_started():
    assert Path(service_unit.program()[0]).is_file()
