"""The documentation says what the code does: every name, code, flag and test vector is checked."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from dipaco.bootstrap.run_config import RunConfig
from dipaco.dht import record_keys, records
from dipaco.modules import errors
from dipaco.modules.codecs import CODECS
from dipaco.modules.config import OuterConfig
from dipaco.modules.files import canonical_json
from dipaco.modules.grid import ModuleLayout
from dipaco.modules.outer import AveragingRule, Contribution, canonical_table, outer_step
from dipaco.modules.state import ModuleState, PathProgress, state_chunks
from dipaco.peer.averaging.group import GatherRow, meeting_key, reduce_shares
from dipaco.peer.check import checks
from dipaco.peer.check.machine import System
from dipaco.peer.exchange import messages
from dipaco.routing.batches import batch_indices
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from support.commands import options_of, parsers

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = ("modules", "routing", "dht", "peer", "bootstrap", "inference", "simulator")
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("examples/**/README.md")])
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples", "docs")
EVERYTHING = [
    ROOT / "README.md",
    *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))),
    *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.md"))),
]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# -- docs/configuration.md


def sections(config: type[BaseModel], name: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Return the tables of a RUN.toml: the top level, then every class that is a field of it."""
    found = [(name, config)]
    for key, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections(field.annotation, key)
    return found


def documented_keys() -> dict[str, dict[str, str]]:
    """Return the rows of docs/configuration.md: section to key to its default, as written."""
    tables: dict[str, dict[str, str]] = {}
    section: str | None = None
    for line in page("configuration.md").splitlines():
        if line.startswith("## "):
            heading = re.fullmatch(r"## (?:`\[(\w+)\]`|Top level)", line)
            section = (heading[1] or "") if heading else None
        row = re.match(r"\| `(\w+)` \| (.*?) \|", line)
        if row and section is not None:
            tables.setdefault(section, {})[row[1]] = row[2]
    return tables


def toml(value: object) -> str:
    """Write a default as a RUN.toml would."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value!r}`"


def test_every_key_of_a_run_toml_is_documented_with_its_default() -> None:
    documented = documented_keys()
    for name, config in sections(RunConfig):
        expected = {
            key: "required" if field.default is PydanticUndefined else toml(field.default)
            for key, field in config.model_fields.items()
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
        }
        assert documented.get(name) == expected, f"[{name}] in docs/configuration.md"
    assert set(documented) == {name for name, _ in sections(RunConfig)}


# -- docs/exit-codes.md


def test_every_exit_code_is_documented() -> None:
    classes = [errors.DipacoError, *errors.DipacoError.__subclasses__()]
    codes = {cls.exit_code for cls in classes if cls.__module__ == errors.__name__}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page("exit-codes.md"), re.M)}
    assert documented == codes | {0, 130}


# -- commands


def code_of(text: str) -> list[str]:
    """Return the code of a page: indented and fenced lines (continued ones joined), and spans."""
    text = re.sub(r"\\\n\s*", "", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for block in re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S):
        lines += block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return lines + re.findall(r"`([^`\n]+)`", prose)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_in_the_pages_exist(file: Path) -> None:
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
    everywhere = set().union(*(options_of(parser) for parser in known.values()))
    foreign = {"--shm-size", "--gpus", "--check", "--install", "--update", "--shutdown"}
    foreign |= {"--set-version", "--model", "--spec", "--build", "--now", "--signal", "--to"}
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(code_of(text))))
    assert mentioned <= everywhere | foreign, mentioned - everywhere - foreign


# -- links and references


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_that_are_named_exist(folder: str) -> None:
    for file in EVERYTHING:
        text = file.read_text(encoding="utf-8")
        for name in re.findall(rf"(?<![\w./-]){folder}/[\w./-]*\.(?:py|md|toml)\b", text):
            assert (ROOT / name).exists(), f"{file.relative_to(ROOT)} names {name}"


def references(word: str, text: str) -> list[str]:
    """Return the numbers in "design 4.3, 4.4", "Promises 1 and 2" and alike."""
    series = rf"\b{word}\s+(\d[\d.]*(?:(?:,\s+|\s+and\s+)\d[\d.]*)*)"
    found = re.findall(series, text, re.I)
    return [number.rstrip(".") for numbers in found for number in re.findall(r"\d[\d.]*", numbers)]


def test_every_reference_to_the_design_leads_somewhere() -> None:
    text = page("design.md")
    known = {
        "design": set(re.findall(r"^#+ (\d[\d.]*?)\.? ", text, re.M)),
        "promises?": set(re.findall(r"^\*\*Promise (\d+)\.\*\*", text, re.M)),
    }
    assert {"4.4", "5"} <= known["design"]
    assert len(known["promises?"]) >= 10
    count = 0
    for file in EVERYTHING:
        content = file.read_text(encoding="utf-8")
        for word, numbers in known.items():
            for number in references(word, content):
                count += 1
                assert number in numbers, f"{file.relative_to(ROOT)}: {word} {number}"
    assert count > 30


# -- docs/windows.md


def test_the_page_for_windows_has_every_remedy_that_names_it() -> None:
    """The doctor says it in a line, the page says how."""
    text = page("windows.md")
    assert "(docs/windows.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    wsl = System("Ubuntu", "5.15", wsl=2)
    told = [
        checks.check_system(System("Ubuntu", "4.4", wsl=1)),
        checks.check_clock(9.0, 1, wsl),
        checks.check_reachability((), "unknown", 0, wsl),
    ]
    remedies = " ".join(check.remedy for check in told)
    for command in ("--set-version", "hwclock -s", "wsl --shutdown", "networkingMode=mirrored",
                    "netsh interface portproxy", ".wslconfig"):  # fmt: skip
        assert command in remedies
        assert command in text
    assert "memory=" in text
    assert "nvidia-smi" in text


# -- docs/protocol.md


def test_every_field_of_records_and_messages_is_in_the_protocol() -> None:
    text = page("protocol.md")
    record_classes = [kind.record for kind in record_keys.KINDS.values() if kind.record is not None]
    message_classes = messages.Message.__subclasses__()
    for cls in [*record_classes, records.ProgressEntry, *message_classes]:
        for name in cls.model_fields:
            assert f"`{name}`" in text, f"{cls.__name__}.{name}"


def test_the_bounds_of_records_are_those_of_the_protocol() -> None:
    for kind in record_keys.KINDS.values():
        row = re.search(rf"^\| `{kind.name}` \|.*$", page("protocol.md"), re.M)
        assert row, kind.name
        cells = [cell.strip().replace(",", "") for cell in row[0].split("|")]
        assert str(kind.max_bytes) in cells, f"{kind.name}: {kind.max_bytes} bytes"
        assert str(int(kind.max_life_s)) in cells, f"{kind.name}: {kind.max_life_s} s"


def test_every_event_kind_is_in_the_protocol() -> None:
    text = page("protocol.md")
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "emit"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                kind = node.args[0].value
                row = re.search(rf"^\| `{kind}` \|.*$", text, re.M)
                assert row, f"event '{kind}' of {file.relative_to(ROOT)}"
                for keyword in node.keywords:
                    assert f"`{keyword.arg}`" in row[0], f"event '{kind}': {keyword.arg}"


def vectors() -> dict[str, str]:
    """Return the test vectors of the protocol: name to value."""
    block = re.search(r"<!-- vectors -->\n```\n(.*?)```", page("protocol.md"), re.S)
    assert block
    return dict(line.split(" = ", 1) for line in block[1].splitlines() if " = " in line)


def test_the_test_vectors_of_the_protocol() -> None:
    layout = ModuleLayout(("a", "b"), ((2,), (1, 2)))
    state = ModuleState(
        module="L0.E0",
        version=1,
        parameters=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        momentum=torch.tensor([0.0, 0.0, 0.5, -0.5]),
        progress={0: PathProgress(1024, 0)},
        layout=layout,
    )
    header = bytes(list(state_chunks(state))[1])
    table = canonical_table(
        [
            Contribution(1, "QmB", 300),
            Contribution(0, "QmA", 100),
            Contribution(1, "QmC", 100),
        ]
    )
    average = torch.tensor([0.1, 0.2, 0.3, 0.4])
    stepped = outer_step(state, average, table, OuterConfig(), 1)
    rule = AveragingRule(CODECS["none"], {0: 3, 1: 7})
    row = GatherRow(1, "L0.E0", 1, state.digest, 0, "QmA", 100, 100)
    assert vectors() == {
        "canonical_json": canonical_json({"b": 1.0, "a": [1, 2], "c": None, "d": 1e-8}).decode(),
        "state_header": header.decode().rstrip(" "),
        "state_header_bytes": str(len(header)),
        "state_bytes": str(state.byte_size),
        "state_digest": state.digest,
        "weights": repr(list(rule.weights(table))),
        "stepped_digest": stepped.digest,
        "meeting_key": meeting_key("L0.E3", 12, 0, "ab" * 32),
        "gather_row": row.to_bytes().hex(),
        "reduce_shares": repr(list(reduce_shares([100, 50, 10, 0]))),
        "batch_0": repr(batch_indices(0, 0, 0, 0, 4, 10).tolist()),
        "batch_2": repr(batch_indices(0, 0, 0, 2, 4, 10).tolist()),
        "batch_replica": repr(batch_indices(7, 3, 1, 0, 5, 1000).tolist()),
    }
