"""`dipaco-generate`: continue a prompt with the path that it is routed to.

dipaco-generate --initial-peers ADDR "The city lies"
dipaco-generate --state-dir simulated "def main(args):" --temperature 0
dipaco-generate --state-dir our-laws-simulated --chat "What is a lien?"
dipaco-generate --state-dir our-laws-simulated --chat
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError
from dipaco.base.running import say
from dipaco.base.settings import Option

from .options import AnswerSettings, SamplingSettings, check_paths

if TYPE_CHECKING:
    import torch

    from dipaco.modules.transformer import PathModel

    from .sources import StateSource

# What a terminal may take for a command: control characters, apart from those that lay out a text.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingSettings, AnswerSettings):
    """The options of `dipaco-generate`."""

    prompt: Annotated[
        str | None,
        Option("how the text begins; - reads it from standard input", "prompt", positional=True),
    ] = None
    chat: Annotated[
        bool,
        Option(
            "the prompt is a message to a model trained on chats, and only the answer follows; "
            "without a prompt, a conversation"
        ),
    ] = False
    path: Annotated[int | None, Option("use this path, whatever the prompt", "P")] = None
    mix: Annotated[int, Option("mix the N best paths, at N times the work", "N", least=1)] = 1
    choose: Annotated[
        int,
        Option("use the one of the N best paths with the least loss on the prompt", "N", least=1),
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is None and not self.chat:
            raise ConfigurationError(
                "give the beginning of a text, such as 'The city lies', or --chat"
            )
        if self.choose > 1 and (self.mix > 1 or self.path is not None):
            raise ConfigurationError("give --choose without --mix and --path")


def run(settings: GenerationSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    device = settings.prepare_process()
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    with settings.open_source() as source:
        check_paths("--mix", settings.mix, source)
        check_paths("--choose", settings.choose, source)
        if settings.chat:
            _chat(settings, source, device, prompt)
        elif prompt is not None:
            tokens = source.tokenizer().beginning(prompt)
            models = _chosen_models(settings, source, device, tokens, tokens)
            print(prompt, end="", flush=True)
            for piece in _answer(settings, source, models, tokens):
                _show(piece)
            print(flush=True)
    return 0


def _chat(
    settings: GenerationSettings, source: StateSource, device: torch.device, prompt: str | None
) -> None:
    """Answer one message; without one, hold a conversation, in which Ctrl+C ends an answer."""
    from .conversation import Conversation, typed_messages

    models: list[PathModel] = []
    with contextlib.closing(Conversation(source.tokenizer())) as conversation:
        if prompt is None:
            say("each line is a message; Ctrl+C ends an answer, Ctrl+D the conversation")
        for message in typed_messages() if prompt is None else (prompt,):
            tokens = conversation.ask(message)
            routed_by = conversation.routed_by()
            models = models or _chosen_models(settings, source, device, tokens, routed_by)
            said = ""
            try:
                for piece in _answer(settings, source, models, tokens):
                    said += piece
                    _show(piece)
            except KeyboardInterrupt:
                if prompt is not None:
                    raise
            print(flush=True)
            conversation.answered(said)


def _chosen_models(
    settings: GenerationSettings,
    source: StateSource,
    device: torch.device,
    tokens: list[int],
    routed_by: list[int],
) -> list[PathModel]:
    """Load the paths that continue `tokens`."""
    from .generate import cheapest_path
    from .sources import assemble_path

    paths = [] if settings.path is None else [settings.path]
    if len(paths) < settings.mix:  # only then are the router and its base model needed
        router = source.document_router(device)
        ranked = router.nearest_paths([routed_by], source.grid.path_count)[0].tolist()
        paths = [*paths, *(path for path in ranked if path not in paths)]
        paths = paths[: max(settings.mix, settings.choose)]
    if settings.choose > 1:
        paths = [cheapest_path(source, paths, tokens, device)]
    models = [assemble_path(source, path, device=device) for path in paths]
    for path in paths:
        say(f"path {path} ({', '.join(source.grid.modules_of_path(path))})")
    return models


def _answer(
    settings: GenerationSettings,
    source: StateSource,
    models: list[PathModel],
    tokens: list[int],
) -> Iterator[str]:
    """Yield the text with which paths continue `tokens`."""
    from .generate import generate_tokens, stream_text

    context = source.model.sequence_length
    if len(tokens) > context:
        say(f"the prompt has {len(tokens)} tokens, of which the last {context} are read")
    tokenizer = source.tokenizer()
    ends, never = tokenizer.ends, tokenizer.never_chosen
    made = generate_tokens(models[0], tokens, settings, models[1:], ends, never)
    yield from stream_text(tokenizer, made)


def _show(piece: str) -> None:
    """Print a part of an answer. Strangers have made the model: it commands no terminal."""
    print(_COMMANDS.sub("?", piece) if sys.stdout.isatty() else piece, end="", flush=True)


COMMAND = Command(
    "dipaco-generate",
    GenerationSettings,
    run,
    description="Route a prompt, load its path alone, and continue the text.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
