"""The rows of a file: JSON Lines, JSON, Parquet, Arrow or plain text, one after the other.

A file's ending tells its form. Its content tells how it is compressed and encoded. Fields that
nobody asks for are not converted, so they may hold anything; what is a text stays one.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

from dipaco.base.errors import CorpusError

from .compression import decompressed
from .quoting import quoted

Row = Mapping[str, Any]
TextUnit = Literal["file", "paragraph", "line"]

_FORMS = {
    ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
READABLE = (
    f"{', '.join(sorted(_FORMS))}, of which JSON and text may be compressed "
    f"({', '.join(_COMPRESSIONS)})"
)
_PARQUET_ROWS = 256
# Longer than any document; a file of another form would fill the memory otherwise.
_MAX_CHARACTERS = 2**28
# Half of a character, as an escape.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def form_of(name: str) -> str | None:
    """Return the form of a file by its name, None if it has no ending that is known."""
    endings = [end for end in map(str.lower, PurePath(name).suffixes) if end not in _COMPRESSIONS]
    return _FORMS.get(endings[-1]) if endings else None


def rows_of(
    name: str, open_file: Callable[[], BinaryIO], fields: Collection[str], unit: TextUnit = "file"
) -> Iterator[Row]:
    """Yield the rows of a file, of which `fields` are read; of a plain text one for each `unit`.

    `open_file` returns it, seekable, at its beginning. A row of a table has the names of all
    columns. Raises CorpusError, which names the file and where possible the line, and what the
    libraries raise that read Parquet, Arrow and compressed files.
    """
    with open_file() as file:
        begin = file.read(8)
        file.seek(0)
        if not begin:
            raise CorpusError(f"{name} is empty; leave it out or make it again")
        form = "parquet" if begin.startswith(b"PAR1") else form_of(name)
        if form is None:
            raise CorpusError(f"{name} has an ending this version cannot read; it reads {READABLE}")
        if form == "parquet":
            yield from _parquet_rows(file, fields)
        elif form == "arrow":
            yield from _arrow_rows(file, fields)
        else:
            text = _text_of(file, begin)
            yield from _json_rows(name, text) if form == "json" else _text_rows(name, text, unit)


def _text_of(file: BinaryIO, begin: bytes) -> io.TextIOWrapper:
    """Return a file's text. What is not of its encoding is found line by line."""
    content = io.BufferedReader(decompressed(file, begin))  # type: ignore[type-var]
    encoding = json.detect_encoding(content.peek(4)[:4])
    return io.TextIOWrapper(content, encoding=encoding, errors="surrogateescape")


def _lines(name: str, text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(iter(lambda: text.readline(_MAX_CHARACTERS + 1), ""), 1):
        if len(line) > _MAX_CHARACTERS:
            raise CorpusError(
                f"{name}:{number} has a line of over {_MAX_CHARACTERS:,} characters; leave it out"
            )
        try:
            line.encode()
        except UnicodeEncodeError:
            raise CorpusError(
                f"{name}:{number} is not {text.encoding.upper()}; save it as UTF-8, or leave the "
                f"line out"
            ) from None
        yield number, line


def _json_rows(name: str, text: io.TextIOWrapper) -> Iterator[Row]:
    """Yield objects that stand one a line, or else those of the one value that a file is. A blank
    line is one without keys."""
    begun = False
    for number, line in _lines(name, text):
        if not line.strip():
            yield {}
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if begun:
                raise CorpusError(f"{name}:{number} is not JSON: {error}") from None
            line += _rest(name, text, error)
            row = _whole(name, number, line)
        if _HALF.search(line):
            row = _whole_characters(row)
        rows = row if isinstance(row, list) and not begun else [row]
        begun = True
        for row in rows:
            if isinstance(row, str):
                row = {"text": row}
            if not isinstance(row, dict):
                raise CorpusError(f"{name}:{number} is no JSON object: {quoted(line.strip())}")
            yield row


def _rest(name: str, text: io.TextIOWrapper, error: Exception) -> str:
    """Return what is left of a file, which may be one value of many lines. `error` says why its
    first line is none."""
    lines, characters = [], 0
    for _, line in _lines(name, text):
        lines.append(line)
        characters += len(line)
        if characters > _MAX_CHARACTERS:
            raise CorpusError(
                f"{name} begins with a line that is not JSON ({error}), and is too long to be one "
                f"value of many lines; write an object a line"
            )
    return "".join(lines)


def _whole_characters(value: Any) -> Any:
    """Return a value with ? for each half of a character, which JSON may hold and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _whole(name: str, number: int, content: str) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        at = number + error.lineno - 1
        raise CorpusError(
            f"{name}:{at} is not JSON: {error.msg}, character {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{name} is not JSON: {error}") from None


def _text_rows(name: str, text: io.TextIOWrapper, unit: TextUnit) -> Iterator[Row]:
    kept: list[str] = []
    characters = 0
    for number, line in _lines(name, text):
        kept.append(line)
        characters += len(line)
        if characters > _MAX_CHARACTERS:
            raise CorpusError(
                f"{name} has a document of over {_MAX_CHARACTERS:,} characters up to line "
                f"{number:,}; write txt_documents = 'paragraph' or 'line' under [data]"
            )
        if unit == "line" or (unit == "paragraph" and not line.strip("\n")):
            yield {"text": "".join(kept).strip("\n")}
            kept, characters = [], 0
    yield {"text": "".join(kept)}


def _parquet_rows(file: BinaryIO, fields: Collection[str]) -> Iterator[Row]:
    # Slow to import, and only preparation and evaluation read text.
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    names = table.schema_arrow.names
    columns = [name for name in names if name in fields]
    if not columns and table.metadata.num_rows:
        yield dict.fromkeys(names)
    for batch in table.iter_batches(_PARQUET_ROWS, columns=columns):
        yield from _table_rows(names, batch)


def _arrow_rows(file: BinaryIO, fields: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file or stream; `datasets` saves streams."""
    import pyarrow.ipc

    try:
        table = pyarrow.ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    except pyarrow.ArrowInvalid:
        file.seek(0)
        table = pyarrow.ipc.open_stream(file)
        batches = iter(table)
    names = table.schema.names
    columns = [name for name in names if name in fields]
    for batch in batches:
        yield from _table_rows(names, batch.select(columns))


def _table_rows(names: list[str], batch: Any) -> Iterator[Row]:
    nothing = dict.fromkeys(names)
    depths = {field.name: depth for field in batch.schema if (depth := _json_depth(field.type))}
    for row in batch.to_pylist():
        for name, depth in depths.items():
            row[name] = _parsed(row[name], depth)
        yield nothing | row


def _json_depth(kind: Any) -> int:
    """Return 1 for a column of JSON, 2 for one of lists of it, ..., and 0 for others."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return 1
    inner = _json_depth(kind.value_type) if hasattr(kind, "value_type") else 0
    return inner + 1 if inner else 0


def _parsed(value: Any, depth: int) -> Any:
    if isinstance(value, list) and depth > 1:
        return [_parsed(item, depth - 1) for item in value]
    return json.loads(value) if isinstance(value, str) else value
