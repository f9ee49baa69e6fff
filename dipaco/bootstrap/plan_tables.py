"""What `dipaco-bootstrap plan` shows: lines and tables."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from dipaco.base.progress import shown_bytes
from dipaco.bootstrap.plan.figures import PlanFigures


def show_figures(figures: PlanFigures, console: Console) -> None:
    """Print the figures for people."""
    _show_model(figures, console)
    console.print(_levels(figures))
    for level in figures.levels:
        if level.rows < level.trainers:
            console.print(
                f"Too many peers: a step of a module of {level.level} takes in {level.rows} of "
                f"{level.trainers:,} trainers, and what the others trained in that round is lost; "
                f"give modules_per_level more modules, or expect fewer peers",
                style="bold",
            )
    console.print(_codecs(figures))
    console.print(_traffic(figures))
    console.print(_sizes("On a peer's disk", figures.disk_bytes))
    console.print(_sizes("Written to a peer's disk in a day", figures.written_bytes))
    if figures.shard_bytes is None:
        console.print("--corpus-tokens N estimates the size of a shard")
    console.print(_sizes("In a peer's GPU memory, at least", figures.device_bytes))
    memory = (
        f"In a peer's main memory, at most ({figures.main_memory_a_parameter:.1f} bytes a "
        f"parameter), besides its programs"
    )
    console.print(_sizes(memory, figures.main_memory_bytes))
    shard = ""
    if figures.shard_bytes is not None:
        shard = f" and a shard of about {shown_bytes(figures.shard_bytes)}"
    console.print(f"A newcomer fetches {shown_bytes(figures.join_bytes)}{shard}")


def _show_model(figures: PlanFigures, console: Console) -> None:
    """Print what is trained, and on how many tokens a round."""
    console.print(
        f"{figures.name}: {figures.paths:,} paths of {_millions(figures.path_parameters)} "
        f"parameters; {_millions(figures.total_parameters)} in all, "
        f"{_millions(figures.shared_parameters)} in shared modules, "
        f"{_millions(figures.private_parameters)} private to each path"
    )
    base = figures.base
    if base is not None and base.rank is None:
        console.print(
            f"A path begins as the base '{base.name}' and trains all of it: "
            f"{_millions(base.parameters)} parameters, {_millions(base.in_tables)} of them in the "
            f"tables of its vocabulary"
        )
    elif base is not None:
        console.print(
            f"Adapters of rank {base.rank} over {base.name}, which is frozen: "
            f"{_millions(base.parameters)} parameters, "
            + ", ".join(f"{shown_bytes(n)} in {f}" for f, n in base.memory_bytes.items())
        )
    if figures.tokens_per_round is not None:
        console.print(
            f"{figures.tokens_per_round:,} tokens a round and path, "
            f"{figures.tokens_per_step:,} a step"
        )


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _levels(figures: PlanFigures) -> Table:
    table = _table(
        "Modules", "level", "modules", "paths each", "trainers", "parameters", "state", "holds"
    )
    for level in figures.levels:
        table.add_row(
            level.level,
            f"{level.modules:,}",
            f"{level.paths_per_module:,}",
            f"{level.trainers:,}",
            f"{level.parameters:,}",
            shown_bytes(level.state_bytes),
            level.holds,
        )
    return table


def _codecs(figures: PlanFigures) -> Table:
    line = f"{figures.line_mbit_per_s:g} Mbit/s"
    table = _table(
        "A peer sends in a round, and receives as much",
        "codec", "bytes a parameter", "a round", "Mbit/s", f"of {line}", "sent to all in", "note",
    )  # fmt: skip
    for name, codec in figures.codecs.items():
        notes = ["this run's"] * (name == figures.codec) + ["too slow"] * (not codec.in_time)
        table.add_row(
            name,
            f"{codec.bytes_a_parameter:.2f}",
            shown_bytes(codec.moved_bytes),
            f"{codec.mbit_per_s:,.2f}",
            f"{codec.line_share:.0%}",
            f"{codec.publish_s:,.1f} s",
            ", ".join(notes),
        )
    table.caption = (
        f"{figures.peers:,} peers; a step is made {figures.gather_s:g} s after a boundary at the "
        f"latest; about {figures.requests:,} requests a round"
    )
    return table


def _traffic(figures: PlanFigures) -> Table:
    columns = ("sent", "files", "DHT", "received", "files", "DHT")
    table = _table("With rows, steps and the DHT, in a round", "a peer that", *columns)
    for peer, ways in figures.traffic.items():
        counts = []
        for way in ways.values():
            counts += [sum(way.values()), way["files"], way["dht"]]
        table.add_row(peer, *map(shown_bytes, counts))
    crowd = figures.crowd
    table.caption = (
        f"{crowd.closed_share:.0%} of the peers cannot be called, {crowd.bootstrap_nodes} "
        f"bootstrap node; nobody comes, goes or moves"
    )
    return table


def _sizes(title: str, sizes: Mapping[str, int]) -> Table:
    table = _table(title, "", "bytes")
    for name, count in sizes.items():
        if count:
            table.add_row(name, shown_bytes(count))
    table.add_section()
    table.add_row("all", shown_bytes(sum(sizes.values())))
    return table
