"""The results as rows, and the tables of them on the pages of docs/results.

    python benchmarks/rows.py                 # what was measured
    python benchmarks/rows.py NAME ...        # the conditions and rows of these, as tables
    python benchmarks/rows.py --write         # put the tables into the pages, after a change

A file of benchmarks/results holds the rows of one question. What it says above its rows holds for
each of them that does not say otherwise: `conditions`, `command` (without it the program is in the
commit alone), `commit` ("before X": the figures came into the pages with X, the code is not newer),
`load` (of the machine, where it was noted), `seed`, `brackets` (what `low` and `high` of a row are)
and `units` ("by row": each `of` has a unit of its own). A row has what it is `of`, its `figure`
with the unit, and its `value`: a number, a text, or several numbers that the figure names.

A page shows a table between `<!-- rows NAME -->` and `<!-- end of rows -->`, and a part of one
with `<!-- rows NAME: FIGURE; FIGURE -->`. Values of several seeds stand in their order.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = HERE.parent / "docs" / "results"
_MARKED = re.compile(r"(<!-- rows ([\w-]+)(?:: (.+?))? -->\n).*?(<!-- end of rows -->)", re.DOTALL)

Row = dict[str, Any]


def names() -> list[str]:
    """Return the names of all questions."""
    return sorted(file.stem for file in RESULTS.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """Return what holds for all rows of a question, with the `rows`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def write(name: str, result: dict[str, Any]) -> None:
    """Write a question with one row a line, so that a change of a row is a change of a line."""
    head = [f"{_json(key)}: {_json(value)}" for key, value in result.items() if key != "rows"]
    rows = ",\n".join(f"  {_json(row)}" for row in result["rows"])
    text = "{\n" + "".join(f" {line},\n" for line in head) + f' "rows": [\n{rows}\n ]\n}}\n'
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def append(name: str, rows: list[Row], **conditions: Any) -> None:
    """Add rows to a question, with the commit of this checkout and the conditions in each."""
    known = read(name) if name in names() else {"title": name, "conditions": "", "rows": []}
    given = {"commit": commit(), **conditions}
    write(name, {**known, "rows": [*known["rows"], *({**row, **given} for row in rows)]})


def commit() -> str:
    """Return the commit of this checkout, with a mark where files differ from it."""
    told = ("git", "describe", "--always", "--dirty", "--exclude=*")
    done = subprocess.run(told, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(result: dict[str, Any], figures: list[str] | None = None) -> str:
    """Return a table in Markdown: a line for each `of`, a column for each figure."""
    rows = [row for row in result["rows"] if figures is None or row["figure"] in figures]
    columns = figures or list(dict.fromkeys(row["figure"] for row in rows))
    seeds = sorted({row["seed"] for row in rows if row.get("seed") is not None})
    lines = [f"| {result.get('of', '')} | {' | '.join(columns)} |"]
    lines += ["|---|" + "---:|" * len(columns)]
    alike = "of" if result.get("units") == "by row" else "figure"
    for of in dict.fromkeys(row["of"] for row in rows):
        cells = []
        for figure in columns:
            own = [row for row in rows if (row["of"], row["figure"]) == (of, figure)]
            places = _places([r for r in rows if own and r[alike] == own[0][alike]])
            of_seed = {row.get("seed"): _cell(row, places) for row in own}
            if None in of_seed or len(of_seed) < 1:
                cells.append(" / ".join(of_seed.values()))
            else:
                until = seeds[: 1 + max(map(seeds.index, of_seed))]
                cells.append(" / ".join(of_seed.get(seed, "–") for seed in until))
        lines.append(f"| {of} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row, places: int) -> str:
    several = row["value"] if isinstance(row["value"], list) else [row["value"]]
    cell = ", ".join(_number(value, places) for value in several)
    if "low" not in row and "high" not in row:
        return cell
    low, high = (_number(row[end], places) if end in row else "open" for end in ("low", "high"))
    return f"{cell} ({low} to {high})"


def _number(value: Any, places: int) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.{places if abs(value) < 1000 else 0}f}".replace("-", "−")


def _places(rows: list[Row]) -> int:
    """Return how many decimals the numbers of a column have at most."""
    numbers = [row[key] for row in rows for key in ("value", "low", "high") if key in row]
    flat = [n for number in numbers for n in (number if isinstance(number, list) else [number])]
    texts = [repr(n) for n in flat if isinstance(n, float) and abs(n) < 1000]
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def filled(text: str) -> str:
    """Return a page with all of its tables made anew."""

    def make(found: re.Match[str]) -> str:
        before, name, figures, after = found.groups()
        made = table(read(name), figures.split("; ") if figures else None)
        return f"{before}\n{made}\n{after}"

    return _MARKED.sub(make, text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Show, or write the pages; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions (their titles alone)")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    parser.add_argument("--json", action="store_true", help="one JSON object with a line a row")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(names()))
    if unknown:
        print(f"there is no {unknown[0]}; there are {', '.join(names())}", file=sys.stderr)
        return 1
    if chosen.write:
        for page in sorted(PAGES.glob("*.md")):
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in chosen.names:
        result = read(name)
        if chosen.json:
            head = {key: value for key, value in result.items() if key not in ("rows", "title")}
            for row in result["rows"]:
                print(_json({"question": name, **head, **row}))
            continue
        told = [f"{key}: {value}" for key, value in result.items() if key not in ("rows", "title")]
        print("\n".join([f"# {result['title']}", "", *told, "", table(result)]))
    if not chosen.names and not chosen.write:
        print("\n".join(f"{name}: {read(name)['title']}" for name in names()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
