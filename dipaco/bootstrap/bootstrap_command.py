"""dipaco-bootstrap: plan and prepare a run, and serve it to the first peers.

dipaco-bootstrap init texts/*.jsonl
dipaco-bootstrap plan examples/tiny/RUN.toml
dipaco-bootstrap prepare examples/tiny/RUN.toml --out my-run
dipaco-bootstrap serve my-run
"""

from __future__ import annotations

import json
import sys

from dipaco.base.command_line import Command, Program
from dipaco.base.errors import CorpusError

from .bootstrap_settings import (
    InitSettings,
    InviteSettings,
    PlanSettings,
    PrepareSettings,
    RevokeSettings,
    ServeSettings,
)

_NO_ADDRESS_YET = "dipaco-peer ADDR --invitation TEXT"


def _run_init(settings: InitSettings) -> int:
    """Run `dipaco-bootstrap init`."""
    from .new_run import write_run_toml

    print(write_run_toml(settings.files, settings.out, settings.base, settings.peers))
    print(f"{settings.out} is written; next: dipaco-bootstrap plan {settings.out}")
    return 0


def _run_prepare(settings: PrepareSettings) -> int:
    """Run `dipaco-bootstrap prepare`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.bootstrap.preparing.added_paths import config_with_paths
    from dipaco.bootstrap.preparing.predecessor import WORK_FOLDER, open_predecessor
    from dipaco.bootstrap.preparing.prepare import prepare
    from dipaco.bootstrap.preparing.stages import Job
    from dipaco.bootstrap.preparing.workers import open_workers
    from dipaco.modules.device import choose_device, prepare_process

    from .prepare_output import Display
    from .run_config import load_run_config

    prepare_process(settings.threads)
    display = Display(peer=settings.initial_peers[0]) if settings.initial_peers else Display()
    before = None
    if settings.predecessor is not None:
        before = open_predecessor(settings.predecessor, allow_genesis=settings.allow_genesis)
    try:
        if before is not None and settings.initial_peers:
            folder = settings.out / WORK_FOLDER / "swarm"
            before = before.with_states_of(settings.initial_peers, folder, display.say)
        if settings.run_toml is not None:
            trained = before.plan.model if before else None
            config = load_run_config(settings.run_toml, trained, settings.changes)
        else:
            assert before is not None  # --add-path needs --from
            config = config_with_paths(before, settings.add_path, settings.changes)
        with open_workers(settings.workers, settings.dask) as workers:
            prepare(
                Job(
                    config=config,
                    out=settings.out,
                    before=before,
                    device=choose_device(settings.device)[0],
                    display=display,
                    workers=workers,
                    operator_key=settings.operator_key,
                    start_in_s=settings.start_in_s,
                    admission=settings.admission,
                    replace=settings.replace,
                )
            )
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue from here", file=sys.stderr)
        raise
    return 0


def _run_plan(settings: PlanSettings) -> int:
    """Run `dipaco-bootstrap plan`."""
    from rich.console import Console

    from dipaco.bootstrap.plan.chat_sample import chat_as_trained
    from dipaco.bootstrap.plan.data_sample import few_documents, look_at_data, tokens_in_sight
    from dipaco.bootstrap.plan.figures import plan_figures

    from .plan_tables import show_figures
    from .run_config import load_run_config

    tokens = None if settings.corpus_tokens is None else int(settings.corpus_tokens)
    config = load_run_config(settings.run_toml, changes=settings.changes)
    chats, few, problem = False, "", None
    try:
        chats = look_at_data(config)
        few = few_documents(config, config.grid.path_count)
        if tokens is None:
            tokens = tokens_in_sight(config, chats=chats)
    except CorpusError as error:
        problem = error  # The figures are of use without the data.
    figures = plan_figures(
        config, tokens, peers=settings.peers, line_mbit_per_s=settings.line_mbps, chats=chats
    )
    if settings.json:
        print(json.dumps(figures.as_json()))
    else:
        show_figures(figures, Console(highlight=False, soft_wrap=True))
        if few:
            print(few)
    if problem is not None:
        raise problem
    if chats and not settings.json:
        print(*chat_as_trained(config), sep="\n")
    return 0


def _run_serve(settings: ServeSettings) -> int:
    """Run `dipaco-bootstrap serve`."""
    # Importing Hivemind and PyTorch takes seconds; --help and mistakes should not.
    from . import bootstrap_node

    return bootstrap_node.run(settings)


def _run_invite(settings: InviteSettings) -> int:
    """Run `dipaco-bootstrap invite`."""
    from dipaco.peer.node.given_address import kept_line

    from .invite import invite

    text = invite(
        settings.folder,
        settings.peers,
        expires_days=settings.expires_days,
        name=settings.name,
        operator_key=settings.operator_key,
    )
    line = kept_line(settings.folder)
    print((line or _NO_ADDRESS_YET).replace("TEXT", text))
    if not line:
        print(
            f"ADDR is the address that dipaco-bootstrap serve {settings.folder} prints; once that "
            "has run, it stands in the line",
            file=sys.stderr,
        )
    return 0


def _run_revoke(settings: RevokeSettings) -> int:
    """Run `dipaco-bootstrap revoke`."""
    from .invite import revoke

    print(revoke(settings.folder, settings.invitations, operator_key=settings.operator_key))
    return 0


_INIT = Command(
    "init",
    InitSettings,
    _run_init,
    summary="write a RUN.toml for some texts or chats",
    description="Look at the first rows of some files, count their documents, and write a RUN.toml "
    "with the right fields and with sizes to begin with.",
)
_PREPARE = Command(
    "prepare",
    PrepareSettings,
    _run_prepare,
    summary="make tokenizer, base model, router, shards and the signed manifest of a run",
    description="Make a run folder from a RUN.toml, or from a run and the documents of a path to "
    "add to it. It may be stopped at any time; the same command continues where it stopped.",
)
_PLAN = Command(
    "plan",
    PlanSettings,
    _run_plan,
    summary="check a RUN.toml and show its parameters, traffic, disk and memory",
    description="Check a RUN.toml and show the sizes of its modules, what a peer sends in a "
    "round, and what it has on disk and in memory. Of the data, only the first documents are "
    "read. Nothing is written.",
)
_SERVE = Command(
    "serve",
    ServeSettings,
    _run_serve,
    summary="start a bootstrap node for a run folder",
    description="Start a bootstrap node: the first address of a swarm. It serves what "
    "newcomers need and keeps copies of states. Ctrl+C leaves cleanly.",
)
_INVITE = Command(
    "invite",
    InviteSettings,
    _run_invite,
    summary="make an invitation to a run: one line for a volunteer",
    description="Print the line that a volunteer pastes, with an invitation for some peers, signed "
    "with the operator's key. Anybody who has it can use it, so give each volunteer one of their "
    "own.",
)
_REVOKE = Command(
    "revoke",
    RevokeSettings,
    _run_revoke,
    summary="end invitations: rows of peers that came in by them stop counting",
    description="Sign a new list of revoked invitations. Nodes that serve the run folder pass it "
    "on within a quarter of a round, and every peer keeps it.",
)
COMMAND = Program(
    "dipaco-bootstrap", str(__doc__), (_INIT, _PREPARE, _PLAN, _SERVE, _INVITE, _REVOKE)
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
