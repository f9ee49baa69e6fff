"""`dipaco-bootstrap plan`: its figures are what the code that they speak of does."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from dipaco.base.progress import shown_bytes
from dipaco.bootstrap.bootstrap_command import main
from dipaco.bootstrap.plan.figures import CALLED, NOT_CALLED, plan_figures
from dipaco.bootstrap.plan_tables import show_figures
from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.layout import layout_of
from dipaco.modules.memory import pass_bytes
from dipaco.modules.state import genesis_state, write_state
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.grid import Grid
from dipaco.training.inner import InnerLoop
from dipaco.training.optimizer_states import KEPT_OPTIMIZERS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAPER = EXAMPLES / "paper" / "RUN.toml"


def _paper():
    return plan_figures(load_run_config(PAPER), 160_000_000_000)


def test_the_paper_s_setting():
    """The figures that examples/paper/README.md shows beside the paper's."""
    config, figures = load_run_config(PAPER), _paper()
    assert (config.data.hub, config.data.hub_config) == ("allenai/c4", "en")
    assert (config.model.vocabulary_size, config.model.block_count) == (32_000, 12)
    assert config.model.hidden_size == 14 * 64 == 896
    assert config.model.head_count == 14
    assert config.grid.private_blocks == (0, 5, 6, 11)
    assert config.rounds.inner_steps == 150
    assert figures.paths == 256
    assert figures.path_parameters == 149_804_928
    assert figures.total_parameters == 256 * 69_049_344 + 16 * (40_377_344 + 40_378_240)
    assert figures.shared_parameters == 16 * (40_377_344 + 40_378_240)
    assert [level.paths_per_module for level in figures.levels] == [16, 16, 1]
    assert [level.holds for level in figures.levels] == [
        "blocks 1-4", "blocks 7-10, final norm", "blocks 0, 5-6, 11, embedding (28.67 M)"
    ]  # fmt: skip
    assert figures.tokens_per_round == 150 * 512 * 1024
    assert figures.shard_bytes == 160_000_000_000 * 2 * 2 // 256
    # A trainer gets the files of the 15 others, and two keepers get those of a private module.
    shared, private = 40_377_344 + 40_378_240, 69_049_344
    assert [level.trainers for level in figures.levels] == [16, 16, 1]
    assert figures.codec == "int4"
    assert figures.codecs["float32"].moved_bytes == 4 * (15 * shared + 2 * private)
    assert figures.moved_bytes == figures.codecs["int4"].moved_bytes
    assert figures.codecs["int4"].bytes_a_parameter == pytest.approx(0.52, abs=0.02)


def test_the_readme_shows_these_figures():
    text = (PAPER.parent / "README.md").read_text()
    figures = _paper()
    for count in (
        figures.moved_bytes,
        figures.disk_total_bytes,
        figures.device_total_bytes,
        figures.main_memory_total_bytes,
        figures.join_bytes,
        figures.shard_bytes or 0,
    ):
        assert shown_bytes(count) in text
    assert f"{figures.path_parameters / 1e6:.1f}M" in text
    assert f"{figures.total_parameters / 1e9:.2f}B" in text
    assert f"{figures.shared_parameters / 1e9:.2f}B" in text
    assert f"{figures.round_mbit_per_s:.1f} Mbit/s" in text


def _said_of(figures):
    shown = io.StringIO()
    show_figures(figures, Console(file=shown, width=400))
    return shown.getvalue()


def test_lines_and_peers_that_are_expected():
    config = load_run_config(PAPER)
    fast, slow = (plan_figures(config, peers=64, line_mbit_per_s=line) for line in (100.0, 5.0))
    assert [level.trainers for level in fast.levels] == [4, 4, 1]
    for name, codec in fast.codecs.items():
        other = slow.codecs[name]
        assert other.line_share == pytest.approx(20 * codec.line_share, abs=1e-3)
        assert other.mbit_per_s == codec.mbit_per_s
        assert codec.publish_s <= other.publish_s
    assert fast.codecs["float32"].in_time
    assert not slow.codecs["float32"].in_time  # one file takes longer than is waited for
    assert slow.codecs["int2"].in_time
    # All others fetch a file at the same time: it is with none of them before it is with most.
    gather_s, level = slow.gather_s, slow.levels[0]
    once = 8e-6 * level.file_bytes["int4"] / gather_s
    for lines, in_time in ((1.1, False), (2.9, False), (3.1, True)):
        figures = plan_figures(config, peers=64, line_mbit_per_s=lines * once)
        assert figures.codecs["int4"].in_time == in_time
    # With many peers a private module has trainers enough to be kept by.
    many = plan_figures(config, peers=256 * 5)
    assert many.levels[-1].trainers == 5
    # More than a step takes in: the rest of a round is lost.
    assert [level.trainers for level in many.levels] == [80, 80, 5]
    assert [level.rows for level in many.levels] == [64, 64, 5]
    assert _said_of(fast).count("Too many peers") == 0
    assert _said_of(many).count("takes in 64 of 80 trainers") == 2
    assert many.levels[-1].moved_bytes["int4"] == 4 * many.levels[-1].file_bytes["int4"]


def test_the_traffic_of_peers_that_can_be_called_and_of_those_that_cannot():
    """Beside what is compared with a swarm in tests/simulator/test_role_traffic.py."""
    figures = plan_figures(load_run_config(EXAMPLES / "tiny" / "RUN.toml"), peers=40)
    called, closed = (figures.as_json()["traffic"][peer] for peer in (CALLED, NOT_CALLED))
    # With ten trainers of each path nobody has to keep a copy for others.
    fetched = sum(level.moved_bytes[figures.codec] for level in figures.levels)
    for peer in (called, closed):
        assert peer["received_bytes"]["files"] == pytest.approx(fetched, rel=0.02)
    # Its files go to two mailboxes, which give them to the others.
    assert closed["sent_bytes"]["files"] < called["sent_bytes"]["files"] / 2
    assert called["sent_bytes"]["dht"] > closed["sent_bytes"]["dht"]
    assert "With rows, steps and the DHT, in a round" in _said_of(figures)


def test_a_token_of_a_chat_takes_more_where_the_vocabulary_is_large():
    config = load_run_config(PAPER)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocabulary_size": 49_152})})
    texts, chats = (plan_figures(config, 10**9, chats=chats).shard_bytes for chats in (False, True))
    assert chats == 2 * texts


def test_parameters_and_states_are_those_of_the_model(tmp_path):
    config = load_run_config(EXAMPLES / "tiny" / "RUN.toml")
    figures = plan_figures(config)
    model = PathModel(config.model)
    initialise(model, 0)
    parameters = dict(model.named_parameters())
    assert figures.path_parameters == sum(p.numel() for p in parameters.values())
    grid = Grid(config.model, config.grid)
    for level in figures.levels:
        module = next(name for name in grid.modules() if grid.level_of(name) == level.level)
        state = genesis_state(module, layout_of(grid, module), parameters)
        write_state(state, tmp_path / module)
        written = (tmp_path / module).stat().st_size
        assert 8 * level.parameters < written <= level.state_bytes < written + 1000
    assert figures.shard_bytes is None
    assert figures.disk_bytes["token files"] == 0


@pytest.mark.parametrize(("optimizer", "named"), [("adamw", "AdamW"), ("muon", "Muon and AdamW")])
def test_memory_is_what_training_keeps(optimizer, named):
    """A GPU holds 16 bytes a parameter and a pass; the pass is counted with real tensors here.
    Muon has one moment of a matrix."""
    config = load_run_config(EXAMPLES / "tiny" / "RUN.toml")
    inner = config.inner.model_copy(update={"optimizer": optimizer})
    config = config.model_copy(update={"inner": inner})
    figures = plan_figures(config)
    model = PathModel(config.model)
    loop = InnerLoop(model, config.inner, torch.device("cpu"))
    tokens = torch.ones(config.inner.batch_sequences, config.model.sequence_length).long()
    loop.step(tokens, 0)
    states = [part["state"] for part in loop.state_dict().values() if isinstance(part, dict)]
    kept_by = [entry for state in states for entry in state.values()]
    moments = sum(t.nbytes for entry in kept_by for t in entry.values() if t.numel() > 1)
    assert figures.device_bytes[named] == moments
    assert figures.disk_bytes["optimizer states"] == KEPT_OPTIMIZERS * moments
    rounds = 86_400 / config.rounds.duration_s
    states = sum(level.state_bytes for level in figures.levels)
    assert figures.written_bytes["own states"] == round(rounds * states)
    assert figures.written_bytes["optimizer states"] == round(moments * min(rounds, 48))
    assert figures.device_bytes["gradients"] == sum(p.nbytes for p in model.parameters())

    kept = {}
    own = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        hidden = model.hidden_states(tokens[:1])
    expected = sum(kept.values()) + 2 * 4 * hidden.numel()
    assert hidden.requires_grad  # what was kept is alive until here
    assert pass_bytes(config.model) == pytest.approx(expected, rel=0.05)


def test_main_memory_follows_the_run():
    config = load_run_config(EXAMPLES / "tiny" / "RUN.toml")
    figures = plan_figures(config)
    path = 4 * figures.path_parameters
    counted = figures.main_memory_bytes
    assert counted["snapshots"] == path
    assert figures.main_memory_a_parameter * figures.path_parameters == pytest.approx(sum(counted.values()))


def test_the_command_prints_both_ways(capsys):
    arguments = ["plan", str(PAPER), "--corpus-tokens", "160e9"]
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    figures = _paper()
    assert values["total_parameters"] == figures.total_parameters
    assert values["disk_total_bytes"] == figures.disk_total_bytes == sum(np.array(list(values["disk_bytes"].values())))
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "256 paths of 149.80 M parameters; 18.97 B in all" in shown
    assert "this run's" in shown
    assert values["device_total_bytes"] == figures.device_total_bytes
    assert "In a peer's GPU memory, at least" in shown
    assert shown_bytes(figures.device_total_bytes) in shown
    assert "In a peer's main memory" in shown
    assert "Written to a peer's disk in a day" in shown
    assert shown_bytes(sum(figures.written_bytes.values())) in shown
    assert shown_bytes(figures.main_memory_total_bytes) in shown


@pytest.mark.parametrize(
    ("change", "complaint"),
    [("private_blocks = [12]", r"blocks 0 to 11"), ("modules_per_levels = [2]", "did you mean 'modules_per_level'")],
)
def test_an_impossible_run_is_refused(tmp_path, capsys, change, complaint):
    key = change.split(" ")[0].removesuffix("s")
    lines = [change if line.startswith(key) else line for line in PAPER.read_text().splitlines()]
    (tmp_path / "RUN.toml").write_text("\n".join(lines))
    assert main(["plan", str(tmp_path / "RUN.toml")]) == 3
    assert complaint in capsys.readouterr().err
    assert main(["plan", str(PAPER), "--corpus-tokens", "0"]) == 3


def test_shown_bytes():
    shown = [shown_bytes(count) for count in (7, 999, 1000, 12_345, 999_900, 5_000_000_000)]
    assert shown == ["7 bytes", "999 bytes", "1 kB", "12.3 kB", "1 MB", "5 GB"]


def test_few_texts_for_many_paths_are_told(capsys):
    tiny = str(EXAMPLES / "tiny" / "RUN.toml")
    for sizes, said in (("[8, 8]", False), ("[20, 20]", True)):
        assert main(["plan", tiny, "--set", f"grid.modules_per_level={sizes}"]) == 0
        assert ("Few texts: 1,286 training documents for 400 paths" in capsys.readouterr().out) == said


def test_a_folder_is_refused_with_the_file_in_it(capsys):
    assert main(["plan", str(EXAMPLES / "tiny")]) == 3
    assert f"such as {EXAMPLES / 'tiny' / 'RUN.toml'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "exit_code", "said"),
    [
        (("outer.momentum=0.5", "name=other"), 0, ""),
        (("outer.momentun=0.5",), 3, "did you mean 'momentum'?"),
        (("outer",), 3, "--set outer.momentum=0.9"),
        (("name.x=1",), 3, "name is 'tiny' in the RUN.toml, and has no keys; --set name=VALUE replaces it"),
        (("data.train='nowhere/*.jsonl'",), 10, "no file matches"),
        ((f"data.train='{EXAMPLES / 'tiny' / 'data'}'",), 10, "name the files in it, for example"),
        (("data.text_field=content",), 10, "text_field = 'text'"),
        (("grid.modules_per_level=[40, 40]",), 10, "1,286 training documents for 1,600 paths"),
        # All mistakes at once, each in words.
        (("name='own texts'", "seed=-1"), 3, "at most 64 letters, digits"),
        (("name='own texts'", "seed=-1"), 3, "(got 'own texts'); and seed: Input should be greater"),
    ],
)
def test_the_command_takes_changes_and_looks_at_the_data(changes, exit_code, said, capsys):
    words = [word for change in changes for word in ("--set", change)]
    assert main(["plan", str(EXAMPLES / "tiny" / "RUN.toml"), "--json", *words]) == exit_code
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.count("\n") == bool(exit_code)
    if exit_code != 3:
        assert json.loads(found.out)["name"] == (
            "other" if exit_code == 0 else load_run_config(EXAMPLES / "tiny" / "RUN.toml").name
        )


def test_the_tokens_of_files_are_estimated_for_the_sizes_of_shards(capsys):
    tiny = EXAMPLES / "tiny" / "RUN.toml"
    assert main(["plan", str(tiny), "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)["shard_bytes"]
    assert main(["plan", str(tiny), "--json", "--corpus-tokens", "1.2e6"]) == 0
    real = json.loads(capsys.readouterr().out)["shard_bytes"]
    assert real / 2 < estimated < real


def test_the_first_rows_of_each_file_are_read(tmp_path, capsys):
    rows = {"a": {"text": "a text"}, "b": {"body": "another text"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 30)
    (tmp_path / "RUN.toml").write_text('name = "two"\n[data]\ntrain = "*.jsonl"\n')
    assert main(["plan", str(tmp_path / "RUN.toml")]) != 0
    assert "b.jsonl has no field 'text'; it has body" in capsys.readouterr().err
