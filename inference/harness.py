"""lm-evaluation-harness over a run: the routed mixture, every path, the best path, the base.

    pip install '.[eval]'
    python -m dipaco.inference.harness --state-dir simulated --tasks my_task --include-path tasks

A request is routed by its context, as a document is; requests are grouped by path, so that each
path is in memory once. The harness knows its models by import: importing `register` names ours
`dipaco`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dipaco.modules.command_line import Command, Option
from dipaco.modules.errors import ConfigurationError

from .options import InferenceSettings

if TYPE_CHECKING:
    import torch
    from dipaco.modules.transformer import PathModel

    from .sources import StateSource

ROUTED, BASE = "routed", "base"


@dataclass(frozen=True)
class Pair:
    """A context and what follows it, as tokens; the context begins with the begin token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class HarnessModel:
    """What the harness asks of a model, by whichever path is set. Knows nothing of the harness.

    `use` is `routed`, `base` or the number of a path.
    """

    def __init__(self, source: StateSource, device: torch.device, *, rows: int = 16) -> None:
        self.source = source
        self.use: str | int = ROUTED
        self.tokenizer = source.tokenizer()
        self.longest = source.plan.model.sequence_length
        self._device = device
        self._rows = rows
        self._router = source.document_router(device)

    def paths_of(self, contexts: Sequence[Sequence[int]]) -> list[str | int]:
        """Return what speaks for each context: a path, or the base."""
        if self.use != ROUTED:
            return [self.use] * len(contexts)
        if not contexts:
            return []
        return [int(path) for path in self._router.route_tokens(contexts)]

    def grouped(self, contexts: Sequence[Sequence[int]]) -> Iterator[tuple[PathModel, list[int]]]:
        """Yield each model that is needed, with the numbers of the contexts that it is for."""
        from .sources import assemble_path

        found = self.paths_of(contexts)
        model = None
        for path in sorted(set(found), key=str):
            if path == BASE:
                chosen = self.source.base_model(self._device)
            else:
                chosen = model = assemble_path(
                    self.source, int(path), model=model, device=self._device
                )
            yield chosen, [number for number, own in enumerate(found) if own == path]

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, in nats, and whether
        it is what the model would say itself. What does not fit is cut off at the beginning."""
        import torch
        from dipaco.modules.config import PAD_TOKEN

        answers: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for model, numbers in self.grouped([pair.context for pair in pairs]):
            numbers.sort(key=lambda n: -len(pairs[n].context) - len(pairs[n].continuation))
            for start in range(0, len(numbers), self._rows):
                batch = numbers[start : start + self._rows]
                texts = [
                    [*pairs[n].context, *pairs[n].continuation][-(self.longest + 1) :]
                    for n in batch
                ]
                width = max(map(len, texts)) - 1
                tokens = torch.full((len(batch), width), PAD_TOKEN)
                for row, text in enumerate(texts):
                    tokens[row, : len(text) - 1] = torch.tensor(text[:-1])
                with torch.no_grad():
                    hidden = model.hidden_states(tokens.to(self._device))
                for row, (number, text) in enumerate(zip(batch, texts, strict=True)):
                    count = min(len(pairs[number].continuation), len(text) - 1)
                    if not count:
                        continue
                    targets = torch.tensor(text[-count:])
                    # Logits of all positions of all rows would be gigabytes for a large vocabulary.
                    with torch.no_grad():
                        logits = model.logits(hidden[row, len(text) - 1 - count : len(text) - 1])
                    own = torch.log_softmax(logits.float().cpu(), -1)
                    said = own.gather(1, targets[:, None]).sum()
                    answers[number] = (float(said), bool((own.argmax(-1) == targets).all()))
        return answers

    def continuations(
        self, prompts: Sequence[Sequence[int]], stops: Sequence[Sequence[str]], most: Sequence[int]
    ) -> list[str]:
        """Return what the model says after each prompt, the likeliest token each time, up to a
        stop string or `most` tokens."""
        from .generate import generate_tokens, stream_text
        from .sampling import Sampling

        answers = [""] * len(prompts)
        for model, numbers in self.grouped(prompts):
            for number in numbers:
                sampling = Sampling(max_tokens=most[number], temperature=0)
                text = ""
                tokens = generate_tokens(model, prompts[number], sampling)
                for piece in stream_text(self.tokenizer, tokens):
                    text += piece
                    found = [at for stop in stops[number] if stop and (at := text.find(stop)) >= 0]
                    if found:
                        text = text[: min(found)]
                        break
                answers[number] = text
        return answers


@functools.cache
def register() -> type[Any]:
    """Make the harness's class of `HarnessModel`, known there as `dipaco`, and return it.

    Raises ConfigurationError where the harness is not installed.
    """
    try:
        # First: the harness loads its own models only while none is registered.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as error:
        raise ConfigurationError(
            f"the harness needs {error.name}; install it with pip install 'dipaco[eval]'"
        ) from None
    from dipaco.modules.config import BEGIN_TOKEN, END_TOKEN

    @register_model("dipaco")
    class DipacoLM(TemplateLM):  # type: ignore[misc]
        """A run, for the harness; `--model_args state_dir=DIR,path=routed`."""

        def __init__(
            self,
            state_dir: str | None = None,
            path: str | int = ROUTED,
            model: HarnessModel | None = None,
            **_: Any,
        ) -> None:
            super().__init__()
            if model is None:
                import torch

                from .sources import open_source

                folder = Path(state_dir) if state_dir else None
                model = HarnessModel(open_source(state_folder=folder), torch.device("cpu"))
            self.model = model
            self.model.use = model_in_use(str(path), model.source.grid.path_count)

        @property
        def eot_token_id(self) -> int:
            return END_TOKEN

        @property
        def prefix_token_id(self) -> int:
            return BEGIN_TOKEN

        @property
        def max_length(self) -> int:
            return self.model.longest

        @property
        def tokenizer_name(self) -> str:
            return str(self.model.source.plan.run_id)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """Return the tokens of a text, which begins a document unless it is said not to."""
            tokens = self.model.tokenizer.encode(string)
            return tokens if add_special_tokens is False else [BEGIN_TOKEN, *tokens]

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            pairs = [Pair(tuple(context), tuple(rest)) for _, context, rest in requests]
            return self.model.scores(pairs)

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """Score whole texts, each by the path of its beginning alone."""
            return [self._rolling(str(request.args[0])) for request in requests]

        def _rolling(self, text: str) -> float:
            tokens = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, BEGIN_TOKEN, self.max_length, 1)
            pairs = [Pair(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            used = self.model.use
            self.model.use = self.model.paths_of([[BEGIN_TOKEN, *tokens]])[0]
            try:
                return sum(score for score, _ in self.model.scores(pairs))
            finally:
                self.model.use = used

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """Continue texts."""
            options = [request.args[1] for request in requests]
            stops = [
                [until] if isinstance(until := one.get("until", []), str) else list(until or [])
                for one in options
            ]
            most = [int(one.get("max_gen_toks", 256)) for one in options]
            prompts = [self.tok_encode(request.args[0]) for request in requests]
            return self.model.continuations(prompts, stops, most)

    return DipacoLM


@dataclass(frozen=True, kw_only=True)
class HarnessSettings(InferenceSettings):
    """What the harness command can be told."""

    tasks: Annotated[str, Option("tasks of the harness, with commas between", "NAMES")]
    include_path: Annotated[Path | None, Option("folder of further tasks", "DIR")] = None
    limit: Annotated[int | None, Option("only so many documents of a task", "N", least=1)] = None
    models: Annotated[
        str, Option("of routed, base, paths (each of them) and 3 (that one), with commas", "NAMES")
    ] = "routed,paths,base"
    json: Annotated[bool, Option("print one JSON object")] = False


def run(settings: HarnessSettings) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    harness = register()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if settings.include_path is not None and not settings.include_path.is_dir():
        raise ConfigurationError(f"--include-path {settings.include_path} is no folder")
    folder = str(settings.include_path) if settings.include_path else None
    manager = TaskManager(include_path=folder)
    known = set(manager.all_tasks)
    wanted = names_of_tasks(settings.tasks, lambda name: name in known or Path(name).is_file())
    device = settings.prepare_process()
    results: dict[str, dict[str, Any]] = {}
    with settings.open_source() as source:
        model = HarnessModel(source, device)
        for name in names_of_models(settings.models, source.grid.path_count):
            found = simple_evaluate(
                model=harness(model=model, path=name),
                tasks=wanted,
                task_manager=manager,
                limit=settings.limit,
                bootstrap_iters=0,
            )
            results[name] = {
                task: {
                    metric.removesuffix(",none"): value
                    for metric, value in values.items()
                    if isinstance(value, float) and "stderr" not in metric
                }
                for task, values in found["results"].items()
            }
    shown = {**results, **best_paths(results, _higher_is_better(found))}
    if settings.json:
        print(json.dumps(shown))
    else:
        for name, tasks in shown.items():
            for task, values in tasks.items():
                figures = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
                print(f"{name:>12}  {task}: {figures}")
    return 0


def model_in_use(name: str, path_count: int) -> str | int:
    """Return what `HarnessModel.use` is for a name: `routed`, `base`, `3` or `path-3`.

    Raises ConfigurationError for any other.
    """
    number = name.removeprefix("path-")
    if name in (ROUTED, BASE):
        return name
    if number.isdecimal() and int(number) < path_count:
        return int(number)
    raise ConfigurationError(
        f"path={name} is none of routed, base, or 0 to {path_count - 1}; give one of these"
    )


def names_of_tasks(text: str, is_known: Callable[[str], object]) -> list[str]:
    """Return the tasks that are named. Raises ConfigurationError for one that is not known."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if not name or not is_known(name):
            raise ConfigurationError(
                f"--tasks '{name}' is no task of the harness; lm-eval ls tasks lists them, and "
                "--include-path DIR adds those of a folder"
            )
    return list(dict.fromkeys(names))


def names_of_models(text: str, path_count: int) -> list[str]:
    """Return what is evaluated, in order: routed, base, or `path-3`. Raises ConfigurationError."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "paths":
            names += [f"path-{path}" for path in range(path_count)]
        elif part in (ROUTED, BASE):
            names.append(part)
        elif part.isdecimal() and int(part) < path_count:
            names.append(f"path-{int(part)}")
        else:
            raise ConfigurationError(
                f"--models '{part}' is none of routed, base, paths, or 0 to {path_count - 1}"
            )
    return list(dict.fromkeys(names))


def best_paths(
    results: dict[str, dict[str, Any]], higher_is_better: dict[str, dict[str, bool]]
) -> dict[str, dict[str, Any]]:
    """Return, for each task and metric, the best figure of a single path."""
    paths = {name: tasks for name, tasks in results.items() if name.startswith("path-")}
    best: dict[str, Any] = {}
    for tasks in paths.values():
        for task, values in tasks.items():
            for metric, value in values.items():
                known = best.setdefault(task, {}).get(metric, value)
                pick = max if higher_is_better.get(task, {}).get(metric, True) else min
                best[task][metric] = pick(known, value)
    return {"best path": best} if best else {}


def _higher_is_better(found: dict[str, Any]) -> dict[str, dict[str, bool]]:
    return {task: dict(metrics) for task, metrics in found.get("higher_is_better", {}).items()}


COMMAND = Command(
    "python -m dipaco.inference.harness",
    HarnessSettings,
    run,
    description="Run tasks of lm-evaluation-harness over the routed mixture, each path, the base.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
