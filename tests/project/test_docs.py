"""The pages say what the code does: settings, exit codes, commands, links, test vectors."""

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from packaging.version import Version
from pydantic import BaseModel, Field

from dipaco.base import errors
from dipaco.base.files import canonical_json
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.outer import OuterRule, canonical_rows
from dipaco.modules.state import ModuleState, PathProgress, state_chunks
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.protocol.chain.steps import Row, Step, genesis_name
from dipaco.protocol.config import ContributionsConfig, OuterConfig
from dipaco.protocol.plan import PROTOCOL_VERSION
from dipaco.protocol.record_keys import NAMESPACE
from dipaco.routing.batches import batch_indices
from project import key_tables
from support.programs.commands import options_of, parsers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOMS = tuple(sorted(file.parent.name for file in (ROOT / "dipaco").glob("*/__init__.py")))
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md", "examples/**/README.md")
    for file in ROOT.glob(pattern)
)
FOLDERS = ("dipaco", "tests", "benchmarks", "examples", "docs")


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


# -- docs/configuration.md


def test_every_key_of_a_run_toml_is_on_the_page_with_its_default_and_bounds():
    """After a change: python tests/project/key_tables.py."""
    text = page("configuration.md")
    assert sorted(key_tables.marked(text)) == sorted(key_tables.sections())
    assert key_tables.written(text) == text


def test_bounds_are_written_in_words():
    class Keys(BaseModel):
        kind: Literal["one", "two"] = Field("one", description="A choice.")
        share: float = Field(0.5, gt=0, le=1, description="A share.")
        count: int | None = Field(None, ge=1, description="A count.")
        seed: int = Field(description="A seed.", ge=0, lt=2**32)

    assert key_tables.table(Keys).splitlines()[2:] == [
        '| `kind` | `"one"` | `one`, `two` | A choice |',
        "| `share` | `0.5` | above 0, at most 1 | A share |",
        "| `count` | none | 1 or more | A count |",
        "| `seed` | required | 0 to below 2^32 | A seed |",
    ]


# -- docs/exit-codes.md


def test_the_page_of_exit_codes_has_every_code():
    classes = [errors.DipacoError, *errors.DipacoError.__subclasses__()]
    codes = {cls.exit_code for cls in classes if cls.__module__ == errors.__name__}
    assert set(map(int, re.findall(r"^\| (\d+) \|", page("exit-codes.md"), re.M))) == {*codes, 0, 130}


# -- commands


def code_of(text):
    """Return the code of a page: indented and fenced lines (continued ones joined), and spans."""
    text = re.sub(r"\\\n\s*", "", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for block in re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S):
        lines += block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return lines + re.findall(r"`([^`\n]+)`", prose)


# The list of changes names what is gone, too.
OF_TODAY = [file for file in PAGES if file.name != "CHANGELOG.md"]


@pytest.mark.parametrize("file", OF_TODAY, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_in_the_pages_exist(file):
    known = parsers()
    text = file.read_text(encoding="utf-8")
    for line in code_of(text):
        line = line.removeprefix("$ ")
        if not re.match(r"dipaco-[a-z]+ ", line):
            continue
        words = shlex.split(line.partition(" #")[0])
        several = {name.split()[0] for name in known if " " in name} - {"dipaco-peer"}
        name = " ".join(words[:2])
        if words[0] not in several and name not in known:
            name = words[0]
        assert name in known, f"{line!r}: no such command"
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert flags <= options_of(known[name]), f"{line!r}: {flags - options_of(known[name])}"
    # What stands alone, or in a line of ours, is a flag of ours or of a script of the repository.
    ours = [line for line in code_of(text) if re.match(r"(\$ )?(--|dipaco-|python )", line)]
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(ours)))
    everywhere = set().union(flags_of_scripts(), *(options_of(parser) for parser in known.values()))
    assert mentioned <= everywhere, mentioned - everywhere


@cache
def flags_of_scripts():
    """Return the flags that benchmarks and examples read."""
    files = [file for name in ("benchmarks", "examples") for file in (ROOT / name).rglob("*.py")]
    texts = "".join(file.read_text(encoding="utf-8") for file in files)
    return frozenset(re.findall(r"\"(--[a-z][a-z0-9-]+)\"", texts))


# -- links and references


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_files_that_are_named_exist(file):
    text = file.read_text(encoding="utf-8")
    for folder in (*FOLDERS, *ROOMS):
        # A page may leave out `dipaco/`.
        place = ROOT if folder in FOLDERS else ROOT / "dipaco"
        for name in re.findall(rf"(?<![\w./-]){folder}/[\w./-]*\.(?:py|md|toml)\b", text):
            assert (place / name).exists(), f"{file.relative_to(ROOT)} names {name}"


# -- references to docs/design.md, and to tests


def prose_of(file):
    """Return the text of a source or page on one line, without what begins a comment's lines."""
    return " ".join(file.read_text(encoding="utf-8").replace("\n#", "\n").split())


def sources():
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def wrong_references(text, titles, promises):
    """Return the references to the design that name no promise, or no section with that title.

    A reference is the number of a section and words of its title, up to the next punctuation mark.
    """
    wrong = []
    for number, words in re.findall(r"\bdesign (\d+(?:\.\d+)*)(?:, ([\w ]*))?", text, re.I):
        title = set(re.findall(r"\w+", titles.get(number, "").lower()))
        if not words.strip() or not title.issuperset(words.lower().split()):
            wrong.append(f"design {number}, {words}")
    numbers = re.findall(r"\bpromise (\d+)", text, re.I)
    return wrong + [f"promise {number}" for number in numbers if not 0 < int(number) <= promises]


def test_references_to_the_design_name_what_stands_there():
    text = page("design.md")
    titles = dict(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? (.+)$", text, re.M))
    promises = len(re.findall(r"^\d+\. ", text.partition("## 5. ")[2].partition("## 6. ")[0], re.M))
    assert wrong_references("Design 4.3, gather and step (promise 3)", titles, promises) == []
    assert len(wrong_references("Design 4.99, gather; design 4.3; promise 99", titles, 12)) == 3
    found = {
        str(file.relative_to(ROOT)): wrong
        for file in [*sources(), *PAGES]
        if file not in (DOCS / "design.md", Path(__file__))
        and (wrong := wrong_references(prose_of(file), titles, promises))
    }
    assert not found, f"each needs a word of the title that it means: {found}"


def is_there(name):
    """Tell whether a dotted name is one of our modules, or of something in one of them."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        folder = (ROOT / "dipaco").joinpath(*parts[:count])
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if file.exists():
            rest = parts[count:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text("utf-8")) is not None
    return False


def test_the_modules_that_are_named_exist():
    assert is_there("dipaco.protocol.grid.Grid")
    assert not is_there("dipaco.protocol.grid.Lattice")
    assert not is_there("dipaco.modules.lattice")
    for file in [*sources(), *PAGES]:
        text = file.read_text(encoding="utf-8")
        named = set(re.findall(rf"\bdipaco\.(?:{'|'.join(ROOMS)})\b(?:\.\w+)*", text))
        wrong = sorted(name for name in named if not is_there(name))
        assert not wrong or file == Path(__file__), f"{file.relative_to(ROOT)} names {wrong}"


def test_a_logger_is_named_after_its_file():
    for file in sorted((ROOT / "dipaco").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for said in re.findall(r'getLogger\("(dipaco\.[\w.]+)"\)', file.read_text("utf-8")):
            assert said == name, f"{file}: {said}"


def test_the_tests_that_are_named_exist():
    files = sorted((ROOT / "tests").rglob("*.py"))
    known = {file.stem for file in files}
    for file in files:
        known.update(re.findall(r"\bdef (test_\w+)", file.read_text(encoding="utf-8")))
    for file in [*sources(), *PAGES]:
        named = set(re.findall(r"\btest_\w+", file.read_text(encoding="utf-8")))
        assert named <= known, f"{file.relative_to(ROOT)} names {sorted(named - known)}"


def test_the_pages_name_the_last_release_and_the_code_comes_after_it():
    changes = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)", changes, re.M)
    assert all(re.fullmatch(r"Unreleased|[\d.]+ \(\d{4}-\d\d-\d\d\)", line) for line in headings)
    released = re.findall(r"^## ([\d.]+)", changes, re.M)[0]
    for file in PAGES:
        named = set(re.findall(r"dipaco-([\d.]+)-py3", file.read_text(encoding="utf-8")))
        assert named <= {released}, file.name
    assert f"version: {released}\n" in (ROOT / "CITATION.cff").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if headings[0] == "Unreleased":
        # An older wheel has to be replaced when this one is installed.
        assert Version(version) > Version(released)
        assert version.endswith(".dev0")
    else:
        assert version == released


# -- docs/protocol.md


def test_the_page_is_of_the_protocol_that_is_spoken():
    text = page("protocol.md")
    assert text.startswith(f"# The protocol, version {PROTOCOL_VERSION}\n")
    assert f"`protocol_version` ({PROTOCOL_VERSION})" in text
    assert f'key     "{NAMESPACE}/' in text


def vectors():
    """Return the test vectors of the protocol: name to value."""
    block = re.search(r"<!-- vectors -->\n```\n(.*?)```", page("protocol.md"), re.S)
    assert block
    return dict(line.split(" = ", 1) for line in block[1].splitlines() if " = " in line)


def computed_vectors():
    """Return what the code computes."""
    layout = ModuleLayout(("a", "b"), ((2,), (1, 2)))
    state = ModuleState(
        module="L0.E0",
        version=1,
        parameters=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        momentum=torch.tensor([0.0, 0.0, 0.5, -0.5]),
        progress={0: PathProgress(1024, 0, 1, 1024)},
        layout=layout,
        usual_norm=0.375,
    )
    header = bytes(list(state_chunks(state))[1])
    ordered = canonical_rows([OuterRow(1, "QmB", 300), OuterRow(0, "QmA", 100), OuterRow(1, "QmC", 100)])
    rule = OuterRule(ContributionsConfig(codec="int4"), OuterConfig(learning_rate=0.7, momentum=0.9), {0: 3, 1: 7})
    gradients = [torch.tensor([0.1, 0.2, 0.3, 0.4]) * number for number in (1, -2, 3)]
    files = [CODECS["int4"].encode(gradient) for gradient in gradients]
    parent = genesis_name("0123456789abcdef", "L0.E0")
    rows = [
        Row("L0.E0", 1, parent, "5" * 64, row.path, row.peer, row.tokens, f"{number:064x}", 66)
        for number, row in enumerate(ordered)
    ]
    return {
        "canonical_json": canonical_json({"b": 1.0, "a": [1, 2], "c": None, "d": 1e-8}).decode(),
        "state_header": header.decode().rstrip(" "),
        "state_header_bytes": str(len(header)),
        "state_bytes": str(state.byte_size),
        "state_digest": state.digest,
        "weights": repr(list(rule.weights(ordered))),
        **{f"file_{name}": codec.encode(gradients[2]).hex()[:48] for name, codec in CODECS.items()},
        "stepped_digest": rule.step(state, files, ordered, 1).digest,
        "genesis_name": parent,
        "row_statement": rows[0].statement.hex(),
        "row_mark": rows[0].mark.hex(),
        "step_name": Step("L0.E0", 1, parent, tuple(rows)).name,
        "batch_0": repr(batch_indices(0, 0, 0, 4, 10).tolist()),
        "batch_2": repr(batch_indices(0, 0, 2, 4, 10).tolist()),
        "batch_of_path_3": repr(batch_indices(7, 3, 1, 5, 1000).tolist()),
    }


def test_the_table_of_codecs_has_each_with_its_block_and_its_integers():
    rows = re.findall(r"^\| `(\w+)` \| (\d*) \| (\d) bits?(?: c)? \| (.+) \|$", page("protocol.md"), re.M)
    table = {name: (int(block), int(bits), integers) for name, block, bits, integers in rows}
    assert ["float32", *table] == list(CODECS)
    for name, (block, bits, integers) in table.items():
        codec = CODECS[name]
        values = 16 * block
        # Scales of 1.0, then codes of all kinds.
        data = (b"\x80\x3f" * 16 + 4 * bytes(range(256)))[: codec.file_bytes(values)]
        shift = re.fullmatch(r"c - (\d+)", integers)
        listed = range(2**bits) if shift else map(int, integers.split(", "))
        assert (codec.block_values, codec.bits) == (block, bits)
        assert set(codec.decode(data, values).tolist()) == {one - (int(shift[1]) if shift else 0) for one in listed}


def test_the_key_of_the_codec_says_how_large_each_makes_a_parameter():
    sizes = [f"{codec.file_bytes(2**20) / 2**20:.2g}" for codec in CODECS.values()]
    said = ContributionsConfig.model_fields["codec"].description
    assert f"in {', '.join(sizes[:-1])} or {sizes[-1]} bytes per parameter, in this order" in said


def test_the_test_vectors_of_the_protocol():
    assert vectors() == computed_vectors()
