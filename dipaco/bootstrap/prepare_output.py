"""What `dipaco-bootstrap prepare` shows: progress, lines and the table of shards."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dipaco.base.errors import printable
from dipaco.base.progress import StageProgress, bar_or_lines
from dipaco.protocol.plan import RunPlan
from dipaco.routing.shards import PathSummary

# Labels of a shard that are shown in the table.
_SHOWN_LABELS = 2


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

    def shards(self, shards: Sequence[PathSummary]) -> None:
        """Show the table of shard sizes."""
        table = Table(title="Shards", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        for heading in ("path", "documents", "sequences", "tokens", "share", "held-out sequences"):
            table.add_column(heading, justify="right")
        labelled = any(shard.labels for shard in shards)
        if labelled:
            table.add_column("mostly")
        whole = max(1, sum(shard.tokens for shard in shards))
        for shard in shards:
            table.add_row(str(shard.path), *_sizes(shard, whole), *([_mostly(shard)] * labelled))
        table.add_section()
        totals = {
            name: sum(getattr(shard, name) for shard in shards)
            for name in (
                "documents",
                "tokens",
                "held_out_documents",
                "sequences",
                "held_out_sequences",
            )
        }
        table.add_row("all", *_sizes(PathSummary(path=0, **totals), whole), *([""] * labelled))
        self.console.print(table)
        if any(shard.learned_tokens is not None for shard in shards):
            self.say(_learned_line(sum(s.learned_tokens or 0 for s in shards), whole))

    def routing(self, shards: Sequence[PathSummary]) -> None:
        """Show whether the shards follow the labels, and which paths nothing tells of."""
        if labelled := sum(sum(shard.labels.values()) for shard in shards):
            commonest = sum(max(shard.labels.values(), default=0) for shard in shards)
            self.say(
                f"Agreement with the labels: {commonest / labelled:.0%} of the tokens are of the "
                f"most common label of their path"
            )
        unscored = [str(shard.path) for shard in shards if not shard.held_out_sequences]
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
        starts = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(plan.start_s))
        self.say(
            f"Run {plan.name} {plan.run_id}: grid {levels}, "
            f"{counts['path'] / 1e6:.2f} M parameters a path "
            f"({counts['shared'] / 1e6:.2f} M shared), {counts['total'] / 1e6:.2f} M in all; "
            f"rounds of {plan.rounds.duration_s:g} s from {starts}"
        )
        # A successor is of no use where the peers of the run before it cannot see it.
        beside = f" --initial-peers {self._peer}" if plan.successor_of is not None else ""
        self.say(f"Start it with: dipaco-bootstrap serve {shlex.quote(str(folder))}{beside}")


def _sizes(shard: PathSummary, whole: int) -> tuple[str, ...]:
    """Return the cells of a shard, of `whole` tokens in all."""
    return (
        f"{shard.documents:,}",
        f"{shard.sequences:,}",
        f"{shard.tokens:,}",
        f"{shard.tokens / whole:.1%}",
        f"{shard.held_out_sequences:,}",
    )


def _mostly(shard: PathSummary) -> Text:
    """Return the largest labels of a shard, each with its part of the tokens."""
    largest = list(shard.labels.items())[:_SHOWN_LABELS]
    return Text(printable(", ".join(f"{n} {c / max(1, shard.tokens):.0%}" for n, c in largest)))


def _learned_line(learned_tokens: int, tokens: int) -> str:
    """Say how much of some chats is learned."""
    return (
        f"Of {tokens:,} tokens of chats {learned_tokens:,} are learned "
        f"({learned_tokens / max(1, tokens):.0%}): what the assistant says; "
        f"{tokens - learned_tokens:,} are only read"
    )
