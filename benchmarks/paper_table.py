"""The paper's table on a small corpus: dense, DiLoCo, flat mixture and DiPaCo in its variants.

    python benchmarks/paper_table.py --data DIR --out DIR
    python benchmarks/paper_table.py --data DIR --out DIR --cells dense,dipaco-2x4-private
    python benchmarks/paper_table.py --out DIR --report-only

DIR of --data holds train-*.jsonl.gz and validation.jsonl.gz (fields `text`, `domain`). All models
have the same tokenizer, the same base and the same inner steps per path, and are scored on the
same held-out tokens without the first 32 of every document. Each cell is a process of its own;
its figures become OUT/cells/<cell>.json, its states stay in OUT for the cells that build on them.
A call goes on where the last one stopped. After every cell the table and the plots are written
anew into --results. The default size takes about five hours of two cores, --shape small with
--steps 200 --round-steps 20 --base-steps 200 less than one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from parts.paper_table_cells import CELLS, CELLS_BY_NAME, SHAPES, Cell, Size, training_flops
from parts.paper_table_report import write_report

HERE = Path(__file__).resolve().parent
_IMPORTS = ("paper_table_runs", "paper_table_training", "paper_table_scores", "torch._dynamo")


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="work folder, kept")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="for reports (docs/results/SHAPE)"
    )
    parser.add_argument("--cells", help="only these, separated by commas, and what they need")
    parser.add_argument("--steps", type=int, default=400, help="inner steps a path (400)")
    parser.add_argument("--round-steps", type=int, default=40, help="inner steps a round (40)")
    parser.add_argument("--base-steps", type=int, default=400, help="steps of the base (400)")
    parser.add_argument("--train-documents", type=int, default=0, help="at most; 0 is all")
    parser.add_argument("--validation-documents", type=int, default=0, help="at most; 0 is all")
    parser.add_argument(
        "--reroute-documents", type=int, default=500, help="that a rerouter is fitted to (500)"
    )
    parser.add_argument("--reroute-steps", type=int, default=300, help="of its training (300)")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="cells at once (1)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="trial", help="sizes (trial)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a cell (1)")
    parser.add_argument("--limit-s", type=float, help="start no cell after so many seconds")
    parser.add_argument("--report-only", action="store_true", help="only write table and plots")
    parser.add_argument("--list", action="store_true", help="list the cells and how far they are")
    return parser


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    size = _size(options, parser)
    options.results = options.results or HERE.parent / "docs" / "results" / size.shape
    if options.list:
        for cell in CELLS:
            print(f"{'done' if _done(options.out, cell) else '-':5s} {cell.name:28s} {cell.title}")
        return 0
    if options.report_only:
        write_report(options.out / "cells", options.results, size)
        return 0
    if options.data is None:
        parser.error("--data DIR is needed: the folder of train-*.jsonl.gz")
    return run_table(options, _chosen(options.cells, parser), size)


def _size(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Size:
    """Return the size of the table; it must be that of the work folder."""
    if options.steps % options.round_steps or (options.steps // options.round_steps) % 2:
        parser.error("--steps must be an even number of --round-steps")
    size = Size(
        steps=options.steps,
        round_steps=options.round_steps,
        base_steps=options.base_steps,
        shape=options.shape,
        train_documents=options.train_documents,
        validation_documents=options.validation_documents,
        reroute_documents=options.reroute_documents,
        reroute_steps=options.reroute_steps,
    )
    file = options.out / "size.json"
    if file.exists():
        kept = Size(**json.loads(file.read_text()))
        if options.report_only or options.list:
            return kept
        if kept != size:
            parser.error(f"{options.out} is of another size: {kept}")
    file.write_text(json.dumps(asdict(size), indent=1) + "\n")
    return size


def _chosen(names: str | None, parser: argparse.ArgumentParser) -> list[Cell]:
    """Return the cells that are asked for and those that they need, in the order of the table."""
    if names is None:
        return list(CELLS)
    wanted: set[str] = set()
    waiting = [name.strip() for name in names.split(",")]
    while waiting:
        name = waiting.pop()
        if name not in CELLS_BY_NAME:
            parser.error(f"no cell '{name}'; there are {', '.join(CELLS_BY_NAME)}")
        wanted.add(name)
        waiting.extend(CELLS_BY_NAME[name].needs)
    return [cell for cell in CELLS if cell.name in wanted]


def run_table(options: argparse.Namespace, cells: list[Cell], size: Size) -> int:
    """Run the cells that are not done, `--jobs` at once. Returns 1 if one failed."""
    started = time.monotonic()
    maker = _process_maker(options.threads)
    waiting = [cell for cell in cells if not _done(options.out, cell)]
    running: dict[str, BaseProcess] = {}
    failed: set[str] = set()
    total = len(cells)
    _say(f"{total - len(waiting)} of {total} cells are done")
    try:
        while waiting or running:
            late = options.limit_s and time.monotonic() - started > options.limit_s
            for cell in [] if late else list(waiting):
                if failed & set(cell.needs):
                    failed.add(cell.name)
                    waiting.remove(cell)
                    _say(f"{cell.name}: left out, because a cell that it needs failed")
                elif len(running) < options.jobs and all(
                    _done(options.out, CELLS_BY_NAME[need]) for need in cell.needs
                ):
                    waiting.remove(cell)
                    _say(f"{cell.name}: started")
                    process = maker.Process(
                        target=_run_logged,
                        args=(_log(options.out, cell.name), cell, options.data, options.out, size),
                    )
                    process.start()
                    running[cell.name] = process
            if not running:
                break
            time.sleep(0.5)
            for name, process in list(running.items()):
                if process.exitcode is None:
                    continue
                del running[name]
                if process.exitcode:
                    failed.add(name)
                    _say(f"{name}: failed ({process.exitcode}), see {_log(options.out, name)}")
                else:
                    result = json.loads(_file(options.out, name).read_text())
                    left = len(waiting) + len(running)
                    _say(
                        f"{name}: perplexity {result['perplexity']:.2f}, "
                        f"{result['seconds']:.0f} s, {left} cells to go"
                    )
                    write_report(options.out / "cells", options.results, size)
    finally:
        for process in running.values():
            process.terminate()
    if failed:
        _say(f"failed: {', '.join(sorted(failed))}; the same command tries them again")
    return 1 if failed else 0


def _process_maker(threads: int) -> multiprocessing.context.ForkServerContext:
    """Return what makes the processes of the cells.

    They are forks of one that has imported everything: that costs as much as dozens of steps.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    folders = (str(HERE), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    maker = multiprocessing.get_context("forkserver")
    maker.set_forkserver_preload(list(_IMPORTS))
    return maker


def _run_logged(log: Path, cell: Cell, data: Path, out: Path, size: Size) -> None:
    """Run a cell, everything that it prints going to its log. Ends with the table's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    run_cell(cell, data, out, size)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_cell(cell: Cell, data: Path, out: Path, size: Size) -> None:
    """Prepare, train and score one cell and write its figures. In a process of its own."""
    # Importing PyTorch takes seconds; --help, --list and mistakes should not.
    import torch
    from dipaco.modules.device import keep_freed_memory
    from dipaco.routing.run_folder import RunFolder
    from paper_table_runs import Runs
    from paper_table_scores import (
        DocumentLosses,
        HeldOut,
        reroute,
        score_dense,
        score_model,
        score_routed,
    )
    from paper_table_training import train_dense_cell, train_swarm_cell

    keep_freed_memory()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started, cpu_started = time.monotonic(), time.process_time()
    runs = Runs(data, out, size)
    figures: dict[str, Any] = {}
    losses: DocumentLosses | None = None
    if cell.kind == "base":
        run = runs.prepared(cell)
        held_out = HeldOut.open(runs.folder("one-path"), size)
        figures["training_seconds"] = time.monotonic() - started
        figures["training_cpu_seconds"] = time.process_time() - cpu_started
        losses = score_model(run.base_model(run.plan()), held_out, size.prefix_tokens)
    elif cell.of:
        run = RunFolder(runs.trained(cell.of))
        held_out = HeldOut.open(runs.folder("one-path"), size)
        figures |= reroute(run.path, held_out, out / "rerouting" / cell.name, size, _say)
    else:
        run = runs.derived(cell)
        held_out = HeldOut.open(runs.folder("one-path"), size)
        if cell.kind == "dense":
            diary = train_dense_cell(run, size, _say)
            losses = score_dense(run, held_out)
        else:
            diary = train_swarm_cell(cell, run, runs.half(cell), size, _say)
            losses = score_routed(run, held_out)
        figures["train_losses"] = diary.losses
        figures["training_seconds"] = diary.values["seconds"]
        figures["training_cpu_seconds"] = diary.values["cpu_seconds"]
    if losses is not None:
        losses.save(out / "documents" / f"{cell.name}.npz")
        figures |= losses.as_dict(held_out.labels)
    figures |= _amounts(cell, run, size)
    figures["seconds"] = time.monotonic() - started
    figures["cpu_seconds"] = time.process_time() - cpu_started
    figures["machine"] = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }
    file = _file(out, cell.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"cell": asdict(cell), "size": asdict(size), **figures}
    file.with_suffix(".partial").write_text(json.dumps(content, indent=1) + "\n")
    file.with_suffix(".partial").replace(file)


def _amounts(cell: Cell, run: Any, size: Size) -> dict[str, Any]:
    """Return tokens, parameters and operations of a cell, what it is built on included."""
    plan = run.plan()
    grid = run.grid(plan)
    parameters_path = sum(grid.layout(m).size for m in grid.modules_of_path(0))
    parameters_total = sum(grid.layout(m).size for m in grid.modules())
    base = size.base_steps * size.batch_tokens
    path = 0 if cell.kind == "base" else size.steps * size.batch_tokens * cell.batch_factor
    seen = base + path * cell.workers
    return {
        "parameters_path": parameters_path,
        "parameters_total": parameters_total,
        "tokens_path": base + path,
        "tokens_total": seen,
        "tokens_per_parameter": (base + path) / parameters_path,
        "training_flops": training_flops(cell.model, seen, size),
        "paths": cell.path_count,
    }


def _file(out: Path, name: str) -> Path:
    return out / "cells" / f"{name}.json"


def _log(out: Path, name: str) -> Path:
    return out / "logs" / f"{name}.log"


def _done(out: Path, cell: Cell) -> bool:
    return _file(out, cell.name).exists()


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
