"""The kit's JSON files as a page: what was measured, part by part, in Markdown.

python -m gpu_kit.table FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def page(folder: Path) -> str:
    """Return a table for each part that left a file, in the order in which they were made."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    return "\n".join(_table(json.loads(file.read_text())) for file in files)


def _table(found: dict[str, Any]) -> str:
    rehearsed = ", a rehearsal" if found["rehearsal"] else ""
    head = f"## {found['part']}\n\n{found['device']}, PyTorch {found['torch']}{rehearsed}"
    lines = [f"{head}, {found['seconds']:.0f} s.\n", "| measure | figures |", "|---|---|"]
    for name, figures in found["measures"].items():
        shown = "; ".join(f"{key} {_cell(value)}" for key, value in figures.items())
        lines.append(f"| {name} | {shown} |")
    for name, trace in found["failed"].items():
        last = trace.strip().splitlines()[-1][:200].replace("|", "/")
        lines.append(f"| {name} | FAILED: {last} |")
    return "\n".join((*lines, ""))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('|', '/')} {_cell(each)}" for key, each in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/")


if __name__ == "__main__":
    print(page(Path(sys.argv[1])))
