"""How `dipaco-bootstrap plan` shows its figures."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from .plan_figures import PlanFigures


def show_figures(figures: PlanFigures, console: Console) -> None:
    """Print the figures for people."""
    console.print(
        f"{figures.name}: {figures.paths:,} paths of {_millions(figures.path_parameters)} "
        f"parameters; {_millions(figures.total_parameters)} in all, "
        f"{_millions(figures.shared_parameters)} in shared modules, "
        f"{_millions(figures.private_parameters)} private to each path"
    )
    if figures.tokens_per_round is not None:
        console.print(
            f"{figures.tokens_per_round:,} tokens a round and path, "
            f"{figures.tokens_per_step:,} a step"
        )
    console.print(_levels(figures))
    console.print(_traffic(figures))
    console.print(_sizes("On a peer's disk", figures.disk_bytes, figures.disk_total_bytes))
    if figures.shard_bytes is None:
        console.print("Without token files; --corpus-tokens estimates them")
    console.print(
        _sizes("In a peer's GPU memory, at least", figures.device_bytes, figures.device_total_bytes)
    )
    console.print(
        _sizes(
            "In a peer's main memory, at most, besides its programs",
            figures.main_memory_bytes,
            figures.main_memory_total_bytes,
        )
    )
    console.print(
        f"A newcomer fetches {shown_bytes(figures.join_bytes)}"
        + (f" and a shard of {shown_bytes(figures.shard_bytes)}" if figures.shard_bytes else "")
        + f"; the manifest has {figures.manifest_bytes:,} of at most "
        f"{figures.greatest_manifest_bytes:,} bytes"
    )


def shown_bytes(count: int) -> str:
    """Return a count of bytes in decimal units, three digits."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _levels(figures: PlanFigures) -> Table:
    table = _table("Modules", "level", "modules", "paths each", "parameters", "state", "of a path")
    for level in figures.levels:
        table.add_row(
            level.level,
            f"{level.modules:,}",
            f"{level.paths_per_module:,}",
            f"{level.parameters:,}",
            shown_bytes(level.state_bytes),
            level.holds,
        )
    return table


def _traffic(figures: PlanFigures) -> Table:
    codecs = tuple(figures.outer_gradient_bytes)
    table = _table("A peer sends in a round, and receives as much", "", *codecs)
    for level in figures.levels:
        if level.paths_per_module > 1:
            cells = (shown_bytes(level.sent_bytes[codec]) for codec in codecs)
            table.add_row(f"outer gradient of {level.level}", *cells)
    copies = (
        ("copies of private states", figures.private_copy_bytes),
        ("copies of best states, at most", figures.best_copy_bytes),
    )
    for name, count in copies:
        if count:
            table.add_row(name, *(shown_bytes(count) for _ in codecs))
    table.add_section()
    both = figures.private_copy_bytes + figures.best_copy_bytes
    table.add_row(
        "all, at most", *(shown_bytes(figures.outer_gradient_bytes[c] + both) for c in codecs)
    )
    table.caption = f"with {figures.codec}: {figures.round_mbit_per_s:,.1f} Mbit/s over a round"
    return table


def _sizes(title: str, sizes: dict[str, int], total: int) -> Table:
    table = _table(title, "", "bytes")
    for name, count in sizes.items():
        if count:
            table.add_row(name, shown_bytes(count))
    table.add_section()
    table.add_row("all", shown_bytes(total))
    return table
