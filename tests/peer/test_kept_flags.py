"""What a volunteer typed holds until he types something else."""

from dipaco.peer import peer_command
from dipaco.peer.kept_flags import NAME, keep_flags, kept_flags

ADDRESS, OTHER = (
    f"/ip4/203.0.113.{n}/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw" for n in (5, 6)
)


def test_an_address_is_given_once(start):
    assert start()[0] == 3
    for given in (f"{ADDRESS}/operator/0123456789abcdef", OTHER):
        start(given)
        assert start()[0].initial_peers == (given,)


def test_limits_hold_until_others_are_typed(start, tmp_path):
    limits = ["--hours", "22-7", "--max-upload-gb-month", "100", "--name", "kitchen laptop", "--no-compile"]
    start(ADDRESS, *limits, "--host-maddrs", "/ip4/127.0.0.1/tcp/1", "--max-rounds", "3", "--invitation", "secret")
    settings, said = start()
    assert (settings.hours, settings.max_upload_gb_month, settings.name) == ("22-7", 100.0, "kitchen laptop")
    assert (settings.compile_model, settings.host_maddrs) == (False, ("/ip4/127.0.0.1/tcp/1",))
    shown = (
        "--no-compile --hours 22-7 --max-upload-gb-month 100 --name 'kitchen laptop' --host-maddrs /ip4/127.0.0.1/tcp/1"
    )
    assert f"as last time: {shown} (forget with --fresh)\n" in said
    # What speaks of one start is not kept, and neither is a secret.
    assert (settings.max_rounds, settings.invitation) == (None, None)
    assert "secret" not in (tmp_path / "cache" / NAME).read_text()
    # What is typed wins, now and the next time, and the rest stays.
    settings, said = start("--hours", "1-2", "--port", "4001")
    assert (settings.hours, settings.name, settings.host_maddrs) == ("1-2", "kitchen laptop", ())
    assert "--hours" not in said
    assert start()[0].hours == "1-2"
    # Another address may be of another swarm, on the same machine.
    assert start(OTHER)[0].hours == "1-2"


def test_fresh_forgets_all_but_the_address(start, tmp_path):
    start(ADDRESS, "--hours", "22-7", "--nice", "5")
    settings, said = start("--fresh", "--nice", "7")
    assert (settings.initial_peers, settings.hours, settings.nice) == ((ADDRESS,), None, 7)
    assert "as last time" not in said
    assert start()[0].hours is None
    start("--fresh")
    assert not (tmp_path / "cache" / NAME).exists()


def test_a_path_is_of_the_swarm_in_which_it_was_chosen(start):
    start(ADDRESS, "--path", "3", "--duty", "50")
    assert start()[0].path == 3
    settings, _ = start(OTHER)
    assert (settings.path, settings.duty) == (None, 50.0)


def test_a_device_takes_the_place_of_several(start, tmp_path):
    (tmp_path / "cache").mkdir()
    keep_flags(tmp_path / "cache", kept_typed(devices=("cuda:0", "cuda:1")))
    assert (start(ADDRESS, "--device", "cpu")[0].devices, start()[0].device) == ((), "cpu")


def test_the_file_can_be_edited_and_what_is_wrong_in_it_is_refused_with_its_name(start, tmp_path):
    start(ADDRESS, "--hours", "22-7")
    file = tmp_path / "cache" / NAME
    file.write_text(file.read_text().replace("22-7", "21-6"))
    assert start()[0].hours == "21-6"
    for kept, code, said in (
        ("--hours night", 3, f"(--hours stands in {file})"),
        ("--nice 50", 3, f"(--nice stands in {file})"),
        ("--host-maddrs nowhere", 4, f"(--host-maddrs stands in {file})"),
        ("--huors 1", 3, f"error: {file}: there is no flag --huors; did you mean --hours?"),
        ("--name 'kitchen", 3, f"{file}: No closing quotation"),
    ):
        file.write_text(f"{kept}\n")
        found, message = start()
        assert (found, said in message) == (code, True), message
        assert file.read_text() == f"{kept}\n"
    assert start("--fresh")[0].hours is None


def kept_typed(**typed):
    from dipaco.base.settings import Typed

    return Typed(typed)


def test_values_of_every_kind_are_read_as_they_were_typed(tmp_path):
    typed = {
        "log_json": tmp_path / 'a "b" ü.json', "duty": 33.5, "nice": 0, "keep_awake": False, "stay": True,
        "devices": ("cpu", "cpu"), "optimizer": "adamw8bit", "pause_while": "a,b\\c", "name": "-x #1",
    }  # fmt: skip
    keep_flags(tmp_path, kept_typed(**typed))
    command = peer_command.COMMAND
    assert command.flags(command.parse(kept_flags({"cache_folder": tmp_path}).words)) == typed
