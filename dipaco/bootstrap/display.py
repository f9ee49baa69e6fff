"""What `dipaco-bootstrap prepare` and `plan` show: progress, lines and tables."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dipaco.base.errors import printable
from dipaco.base.progress import StageProgress, bar_or_lines, shown_bytes, shown_time
from dipaco.protocol.plan import PathShard, RunPlan
from dipaco.routing.report import RoutingReport
from dipaco.routing.shards import PathSummary

if TYPE_CHECKING:
    from dipaco.bootstrap.plan.figures import PlanFigures
    from dipaco.bootstrap.plan.times import Times


class Display:
    """All output of `dipaco-bootstrap prepare`."""

    def __init__(self, console: Console | None = None, peer: str = "ADDR") -> None:
        """`peer` is the address of a peer of the run before, for the line to start with."""
        self.console, self._peer = console or Console(highlight=False), peer

    def say(self, line: str) -> None:
        """Show one line."""
        self.console.print(printable(line), markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[StageProgress]:
        """Show the progress of a stage while it runs, and its time when it is done."""
        started_at = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"{name} ...")
        with bar_or_lines(name, self.console) as progress:
            yield progress
        self.say(f"{name}: done in {time.monotonic() - started_at:.1f} s")

    def shards(self, shards: Sequence[PathShard], summaries: Sequence[PathSummary]) -> None:
        """Show the table of shard sizes."""
        table = Table(title="Shards", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        for heading in ("path", "documents", "sequences", "tokens", "share", "held out"):
            table.add_column(heading, justify="right")
        labelled = any(summary.labels for summary in summaries)
        if labelled:
            table.add_column("mostly")
        total_tokens = sum(summary.train_tokens for summary in summaries)
        for shard, summary in zip(shards, summaries, strict=True):
            cells = [
                str(shard.path),
                f"{summary.train_documents:,}",
                f"{shard.train_sequences:,}",
                f"{summary.train_tokens:,}",
                f"{summary.train_tokens / max(1, total_tokens):.1%}",
                f"{shard.validation_sequences:,}",
            ]
            mostly = ", ".join(f"{name} {share:.0%}" for name, share in summary.labels)
            table.add_row(*cells, *([Text(printable(mostly))] if labelled else []))
        table.add_section()
        cells = [
            "all",
            f"{sum(summary.train_documents for summary in summaries):,}",
            f"{sum(shard.train_sequences for shard in shards):,}",
            f"{total_tokens:,}",
            "100.0%",
            f"{sum(shard.validation_sequences for shard in shards):,}",
        ]
        table.add_row(*cells, *([""] if labelled else []))
        self.console.print(table)
        learned = [s.learned_tokens for s in summaries if s.learned_tokens is not None]
        if learned:
            self.say(learned_line(sum(learned), total_tokens))

    def routing(self, report: RoutingReport) -> None:
        """Show how even the shards are, and whether they follow the labels."""
        self.say(
            f"Routing by {report.kind}: the largest shard has {report.max_over_mean:.2f} and the "
            f"smallest {report.min_over_mean:.2f} of the expected {report.expected_tokens:,.0f} "
            f"tokens, {report.entropy_ratio:.1%} of the greatest entropy"
        )
        if report.agreement:
            self.say(
                f"Agreement with the labels: normalised mutual information "
                f"{report.agreement.normalised_mutual_information:.2f}, purity "
                f"{report.agreement.purity:.0%}"
            )
        unscored = [str(path.path) for path in report.paths if not path.held_out_sequences]
        if unscored:
            named = ", ".join(unscored[:8]) + ", ..." * (len(unscored) > 8)
            self.say(
                f"No held-out document goes to {'path' if len(unscored) == 1 else 'paths'} "
                f"{named}: nothing tells how good their texts become, or whether a state of others "
                f"harms them. Under [data] give more validation documents or a higher "
                f"held_out_fraction"
            )

    def run(self, plan: RunPlan, counts: dict[str, int], folder: str) -> None:
        """Show what was made and how to start it."""
        levels = " x ".join(map(str, plan.grid.modules_per_level))
        levels += f" and {plan.grid.added_paths} added" * bool(plan.grid.added_paths)
        starts = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(plan.start_s))
        self.say(
            f"Run {plan.name} {plan.run_id}: grid {levels}, "
            f"{counts['path'] / 1e6:.2f} M parameters a path "
            f"({counts['shared'] / 1e6:.2f} M shared), {counts['total'] / 1e6:.2f} M in all; "
            f"rounds of {plan.rounds.duration_s:g} s from {starts}"
        )
        # A successor is of no use where the peers of the run before it cannot see it.
        beside = f" --initial-peers {self._peer}" if plan.successor_of is not None else ""
        self.say(f"Start it with: dipaco-bootstrap serve {shlex.quote(str(folder))}{beside}")


def learned_line(learned_tokens: int, tokens: int) -> str:
    """Say how much of some chats is learned."""
    return (
        f"Of {tokens:,} tokens of chats {learned_tokens:,} are learned "
        f"({learned_tokens / max(1, tokens):.0%}): what the assistant says; "
        f"{tokens - learned_tokens:,} are only read"
    )


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
    console.print(_traffic(figures))
    console.print(_roles(figures))
    _show_needs(figures, console)
    console.print(
        f"A newcomer fetches {shown_bytes(figures.join_bytes)}"
        + (f" and a shard of {shown_bytes(figures.shard_bytes)}" if figures.shard_bytes else "")
        + f"; the manifest has {figures.manifest_bytes:,} of at most "
        f"{figures.greatest_manifest_bytes:,} bytes"
    )
    if figures.times is None:
        console.print("To estimate times, give --tokens-per-s N or --measure auto")
    else:
        console.print(_times(figures.times, figures.peers))


def _show_model(figures: PlanFigures, console: Console) -> None:
    """Print what is trained, and on how many tokens a round."""
    console.print(
        f"{figures.name}: {figures.paths:,} paths of {_millions(figures.path_parameters)} "
        f"parameters; {_millions(figures.total_parameters)} in all, "
        f"{_millions(figures.shared_parameters)} in shared modules, "
        f"{_millions(figures.private_parameters)} private to each path"
    )
    if figures.begins_as is not None:
        start = figures.begins_as
        console.print(
            f"A path begins as the base '{start.name}' and trains all of it: "
            f"{_millions(start.parameters)} parameters, {_millions(start.in_tables)} of them in "
            f"the tables of its vocabulary"
        )
    if figures.base is not None:
        console.print(
            f"Adapters of rank {figures.base.rank} over {figures.base.name}, which is frozen: "
            f"{_millions(figures.base.parameters)} parameters, "
            + ", ".join(f"{shown_bytes(n)} in {f}" for f, n in figures.base.memory_bytes.items())
        )
        whole = figures.base.whole
        console.print(
            f"A run that trains the whole model moves {shown_bytes(whole.moved_bytes)} a round in "
            f"place of {shown_bytes(figures.moved_bytes)}, and takes "
            f"{shown_bytes(whole.device_bytes)} of GPU memory in place of "
            f"{shown_bytes(figures.device_total_bytes)}"
        )
    if figures.tokens_per_round is not None:
        console.print(
            f"{figures.tokens_per_round:,} tokens a round and path, "
            f"{figures.tokens_per_step:,} a step"
        )


def _show_needs(figures: PlanFigures, console: Console) -> None:
    """Print what a peer needs of disk, GPU and main memory."""
    console.print(_sizes("On a peer's disk", figures.disk_bytes, figures.disk_total_bytes))
    if figures.shard_bytes is None:
        console.print("There are no token files; --corpus-tokens N estimates their sizes")
    console.print(
        _sizes("In a peer's GPU memory, at least", figures.device_bytes, figures.device_total_bytes)
    )
    if figures.base is None:
        plain, others = (figures.greatest_paths[kind] for kind in ("adamw", "adamw8bit"))
        what, besides = "a path like this one of about", "with --optimizer adamw8bit of"
    else:
        plain, others = (figures.base.greatest[kind] for kind in ("bf16", "nf4"))
        what, besides = "adapters of a base like this one of about", "in nf4 of"
    console.print(
        f"A GPU of {', '.join(map(str, plain))} GiB trains {what} "
        f"{', '.join(map(_millions, plain.values()))} parameters, {besides} "
        f"{', '.join(map(_millions, others.values()))}: a sequence at a time, blocks twice"
    )
    console.print(
        _sizes(
            f"In a peer's main memory, at most ({figures.main_memory_a_parameter:.1f} bytes a "
            f"parameter), besides its programs",
            figures.main_memory_bytes,
            figures.main_memory_total_bytes,
        )
    )


def _times(times: Times, peers: int) -> str:
    ends = (
        ("all schedules end", times.schedule_s),
        ("all texts were trained once", times.corpus_s),
    )
    base = f"trains the base model for about {shown_time(times.base_s)}, and " * bool(times.base_s)
    return (
        f"At {times.tokens_per_s:,.0f} tokens/s a peer: prepare {base}tokenises and routes; a "
        f"round has {times.steps_per_round:,} steps in {shown_time(times.round_s)}"
        + "".join(
            f"; {what} after {shown_time(seconds)} of {peers:,} peers"
            for what, seconds in ends
            if seconds is not None
        )
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
        "Modules", "level", "modules", "paths each", "trainers", "parameters", "state", "of a path"
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


def _traffic(figures: PlanFigures) -> Table:
    line = f"{figures.line_mbit_per_s:g} Mbit/s"
    table = _table(
        "A peer sends in a round, and receives as much",
        "codec", "bytes a parameter", "a round", "Mbit/s", f"of {line}", "one file in", "",
    )  # fmt: skip
    used = {level.codec for level in figures.levels}
    for name, codec in figures.codecs.items():
        note = "of this run" if name in used else ""
        table.add_row(
            name,
            f"{codec.bytes_a_parameter:.2f}",
            shown_bytes(codec.moved_bytes),
            f"{codec.mbit_per_s:,.2f}",
            f"{codec.line_share:.0%}",
            f"{codec.publish_s:,.1f} s",
            note if codec.in_time else f"{note} too slow".strip(),
        )
    table.caption = (
        f"{figures.peers:,} peers; a step is made {figures.gather_s:g} s after a boundary at the "
        f"latest; about {figures.requests:,} requests a round"
    )
    return table


def _roles(figures: PlanFigures) -> Table:
    table = _table(
        "By role, in a round",
        "role", "sent", "files", "DHT", "received", "files", "DHT", "a peer has",
    )  # fmt: skip
    for role in figures.roles:
        ways = (role.traffic.sent, role.traffic.received)
        counts = [count for way in ways for count in (way.total, way.files, way.dht)]
        often = "" if role.times is None else f"{role.times:.2f}"
        table.add_row(role.role, *(shown_bytes(round(count)) for count in counts), often)
    crowd = figures.crowd
    table.caption = (
        f"{crowd.closed_share:.0%} of the peers cannot be called, {crowd.bootstrap_nodes} "
        f"bootstrap node; nobody comes, goes or moves; keeper and mailbox come on top"
    )
    return table


def _sizes(title: str, sizes: dict[str, int], total: int) -> Table:
    table = _table(title, "", "bytes")
    for name, count in sizes.items():
        if count:
            table.add_row(name, shown_bytes(count))
    table.add_section()
    table.add_row("all", shown_bytes(total))
    return table
