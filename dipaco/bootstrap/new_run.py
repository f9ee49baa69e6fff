"""`dipaco-bootstrap init`: a RUN.toml that works, from some files of texts or chats.

The sizes that it proposes are a place to begin, not a law.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco.base.errors import ConfigurationError

from .first_look import FirstLook, look_at_files

# A path needs at least this much text of its own to learn something that the others do not.
_DOCUMENTS_OF_A_PATH, _TOKENS_OF_A_PATH = 50, 100_000
_MOST_PATHS = 256
# Without files of their own, held-out texts are taken away from training.
_HELD_OUT_OF_A_PATH, _HELD_OUT, _MOST_HELD_OUT = 10, 0.01, 0.2
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class _Size:
    """The size of a model for at least so many tokens of text."""

    tokens: int
    hidden_size: int
    head_count: int
    block_count: int
    vocabulary_size: int
    sequence_length: int


# From one token a parameter, where most parameters are the embedding's, to twenty.
_SIZES = (
    _Size(0, 64, 4, 4, 1024, 128),
    _Size(500_000, 96, 4, 4, 2048, 128),
    _Size(2_000_000, 128, 4, 6, 4096, 256),
    _Size(8_000_000, 192, 6, 6, 4096, 256),
    _Size(30_000_000, 256, 8, 8, 8192, 256),
    _Size(100_000_000, 384, 6, 8, 8192, 512),
    _Size(400_000_000, 512, 8, 10, 16384, 512),
    _Size(2_000_000_000, 768, 12, 12, 32000, 1024),
)


def write_run_toml(files: Sequence[str], out: Path, base: str | None, peers: int) -> str:
    """Write a RUN.toml for some files, and return what was found in them, in lines.

    `base` names a public checkpoint to train adapters over, `peers` how many are expected. Raises
    CorpusError, ConfigurationError and what `load_run_config` raises, and then writes nothing.
    """
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .plan.data_sample import few_documents, look_at_data
    from .run_config import load_run_config

    if out.exists():
        raise ConfigurationError(
            f"{out} is there already; move it away, or name another with --out"
        )
    found = look_at_files(files)
    if found.chats and base is None:
        raise ConfigurationError(
            f"{files[0]} holds chats, which are trained as adapters over a public model; name one "
            f"with --base, such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    out.write_text(_run_toml(found, out, base, peers), encoding="utf-8")
    try:
        config = load_run_config(out)
        look_at_data(config)
        few = few_documents(config, config.grid.path_count)
    except BaseException:
        out.unlink()
        raise
    return "\n".join([*_said(found), *([few] if few else [])])


def _run_toml(found: FirstLook, out: Path, base: str | None, peers: int) -> str:
    """Return the text of a RUN.toml at `out`."""
    tokens = found.tokens
    paths = _path_count(found.documents, tokens, peers)
    grid = _grid(paths)
    size = max((size for size in _SIZES if size.tokens <= tokens), key=lambda size: size.tokens)
    document_tokens = tokens / max(1, found.documents)
    sequence_length = size.sequence_length if base is None else 512
    while sequence_length > 64 and sequence_length > 2 * document_tokens:
        sequence_length //= 2
    lines = [
        f"# For about {tokens:,} tokens in {found.documents:,} documents, and {peers} peers. Every "
        f"line may be",
        "# changed; docs/configuration.md describes all keys.",
        "#",
        f"#   dipaco-bootstrap plan {out}",
        f"#   dipaco-bootstrap prepare {out} --out my-run",
        "#   dipaco-bootstrap serve my-run",
        "",
        f"name = {json.dumps(_name(found, out))}",
        *([] if base is None else [f"base = {_base(base, out)}"]),
        "",
        *_data(found, out.absolute().parent),
        *_held_out(found, paths),
        "",
    ]
    lines += ["[model]"]
    if base is None:
        lines += [
            f"vocabulary_size = {size.vocabulary_size}",
            f"block_count = {size.block_count}",
            f"hidden_size = {size.hidden_size}",
            f"head_count = {size.head_count}",
        ]
    lines += [f"sequence_length = {sequence_length}"]
    if base is None:
        # This is half a pass over the text: paths learn the rest.
        steps = min(1000, max(50, round(tokens / 2 / (8 * sequence_length))))
        lines += [
            "tied_embedding = false",
            "",
            "[grid]",
            f"modules_per_level = {list(grid)}",
            f"private_blocks = [0, {size.block_count - 1}]",
            "private_embedding = true",
            "",
            "[base]",
            f"steps = {steps} # trained by `prepare` on this machine, before the paths",
        ]
    else:
        lines += ["", "[adapters]", "rank = 16", "", "[grid]", f"modules_per_level = {list(grid)}"]
    duration_s = 60 if size.hidden_size <= 128 and base is None else 600
    return "\n".join([*lines, "", "[rounds]", f"duration_s = {duration_s}.0", ""])


def _path_count(documents: int, tokens: int, peers: int) -> int:
    """Return a power of two: a path for each peer, but none with too little to learn from."""
    most = min(peers, documents // _DOCUMENTS_OF_A_PATH, tokens // _TOKENS_OF_A_PATH, _MOST_PATHS)
    return 1 << max(1, most.bit_length() - 1)


def _grid(paths: int) -> tuple[int, int]:
    """Return two levels, as square as possible, so that each module is shared by many paths."""
    exponent = paths.bit_length() - 1
    return 1 << exponent // 2, 1 << exponent - exponent // 2


def _name(found: FirstLook, out: Path) -> str:
    folders = (out.absolute().parent, found.train[0].absolute().parent)
    names = (_NOT_IN_A_NAME.sub("-", folder.name).strip("-._")[:64] for folder in folders)
    return next((name for name in names if name), "run")


def _base(base: str, out: Path) -> str:
    is_folder = Path(base).is_dir()
    given = os.path.relpath(base, out.absolute().parent) if is_folder else base
    return json.dumps(given, ensure_ascii=False)


def _data(found: FirstLook, folder: Path) -> list[str]:
    lines = ["[data]", f"train = {_named(found.train, folder, found.validation)}"]
    if found.validation:
        lines.append(f"validation = {_named(found.validation, folder)}")
    if not found.chats and found.text_field != "text":
        lines.append(f"text_field = {json.dumps(found.text_field, ensure_ascii=False)}")
    if found.label_field is not None:
        lines.append(f"label_field = {json.dumps(found.label_field, ensure_ascii=False)}")
    if found.text_unit != "file":
        lines.append(f'txt_documents = "{found.text_unit}"')
    return lines


def _held_out(found: FirstLook, paths: int) -> list[str]:
    """Return what is held out, where the default would leave a path without a held-out text."""
    wanted = _HELD_OUT_OF_A_PATH * paths / max(1, found.documents)
    if found.validation or wanted <= _HELD_OUT:
        return []
    return [f"held_out_fraction = {min(wanted, _MOST_HELD_OUT):.2g}"]


def _named(files: Sequence[Path], folder: Path, others: Sequence[Path] = ()) -> str:
    """Return how a RUN.toml in `folder` names files: by one pattern, if it matches them and
    `others` alone."""
    first = files[0]
    pattern = first.parent / f"*{''.join(first.suffixes)}"
    if len(files) > 1 and set(glob.glob(str(pattern))) == set(map(str, [*files, *others])):
        files = [pattern]
    names = [os.path.relpath(path, folder) for path in files]
    return json.dumps(names if len(names) > 1 else names[0], ensure_ascii=False)


def _said(found: FirstLook) -> list[str]:
    kind = "chats" if found.chats else "documents"
    about = (
        "" if found.counted == 1 else f"about, from the first {found.counted:.1%} of the files: "
    )
    count = f"{about}{found.documents:,} {kind} with {found.characters:,} characters"
    lines = [f"{len(found.train):,} file{'s' * (len(found.train) > 1)} to train on; {count}"]
    if not found.chats and found.text_field != "text":
        lines.append(f"the text is the field '{found.text_field}'")
    if found.label_field is not None:
        lines.append(f"results are told apart by the field '{found.label_field}'")
    if found.validation:
        names = ", ".join(path.name for path in found.validation)
        lines.append(f"held out by their names: {names}")
    return lines
