"""The tables of keys in docs/configuration.md, made of the classes of a RUN.toml.

A table stands between `<!-- keys SECTION -->` and `<!-- end of keys -->`. After a change of a key, its bounds or its
description, write them again:

    python tests/project/key_tables.py
"""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dipaco.bootstrap.run_config import RunToml

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
TOP_LEVEL = "top-level"
_MARKED = re.compile(r"(<!-- keys ([\w-]+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)


def sections(config=RunToml, name=TOP_LEVEL):
    """Return the tables of a RUN.toml: the top level, then every class that is a field of it."""
    found = {name: config}
    for key, field in config.model_fields.items():
        table = _table_of(field.annotation, may_be_left_out=config is RunToml)
        if table is not None:
            found.update(sections(table, key))
    return found


def written(text):
    """Return the page with all tables as the code has them."""
    known = sections()
    return _MARKED.sub(lambda found: f"{found[1]}\n{table(known[found[2]])}\n\n{found[3]}", text)


def marked(text):
    """Return the names of the sections that have a table on the page, in its order."""
    return [found[2] for found in _MARKED.finditer(text)]


def table(config):
    """Return the table of the keys of a class."""
    rows = ["| key | default | bounds | meaning |", "|---|---|---|---|"]
    # What kind something is comes first.
    for key, field in sorted(config.model_fields.items(), key=lambda item: item[0] != "kind"):
        if _table_of(field.annotation, may_be_left_out=config is RunToml) is None:
            default = "required" if field.default is PydanticUndefined else _toml(field.default)
            assert field.description, f"{config.__name__}.{key} has no description"
            cells = (f"`{key}`", default, _bounds(field), field.description.removesuffix("."))
            rows.append(" ".join(("|", *(f"{cell} |".strip() for cell in cells))))
    return "\n".join(rows)


def _table_of(annotation, *, may_be_left_out):
    """Return the class of a field that is a table; of the top level also one that may be none."""
    kinds = [annotation, *(get_args(annotation) if may_be_left_out else ())]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _toml(value):
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


def _bounds(field):
    """Return what the type of a field allows, in words."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            return ", ".join(f"`{value}`" for value in get_args(kind))
    limits = {
        name: getattr(limit, name)
        for limit in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(limit, name, None) is not None
    }
    low = f"above {_number(limits['gt'])}" if "gt" in limits else _number(limits.get("ge"))
    high = f"below {_number(limits['lt'])}" if "lt" in limits else _number(limits.get("le"))
    if not high:
        return low and (low if "gt" in limits else f"{low} or more")
    if "gt" in limits:
        return f"{low}, {high if 'lt' in limits else f'at most {high}'}"
    return f"{low} to {high}"


def _number(value):
    if value is None:
        return ""
    power = int(value).bit_length() - 1
    return (
        f"2^{power}" if power >= 12 and value == 2**power else f"{int(value):,}" if value == int(value) else str(value)
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
