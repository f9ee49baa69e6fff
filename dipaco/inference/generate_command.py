"""`dipaco-generate`: continue a prompt with the path that it is routed to.

dipaco-generate --initial-peers ADDR "The city lies"
dipaco-generate --state-dir my-run-simulated "def main" --temperature 0
dipaco-generate --state-dir our-laws-simulated --chat "What is a lien?"
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError
from dipaco.base.running import say
from dipaco.base.settings import Option

from .options import AnswerSettings, SamplingSettings, check_paths


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingSettings, AnswerSettings):
    """What `dipaco-generate` can be told."""

    prompt: Annotated[
        str,
        Option("how the text begins; - reads it from standard input", "prompt", positional=True),
    ]
    chat: Annotated[
        bool, Option("the prompt is a message to a model trained on chats; only the answer follows")
    ] = False
    path: Annotated[int | None, Option("use this path, whatever the prompt", "P")] = None
    mix: Annotated[int, Option("mix the N best paths, at N times the work", "N", least=1)] = 1
    choose: Annotated[
        int,
        Option("use the one of the N best paths with the least loss on the prompt", "N", least=1),
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose > 1 and (self.mix > 1 or self.path is not None):
            raise ConfigurationError("give --choose without --mix and --path")


def run(settings: GenerationSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .generate import (
        chat_tokens,
        cheapest_path,
        generate_tokens,
        stream_text,
    )
    from .sources import assemble_path

    device = settings.prepare_process()
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    with settings.open_source() as source:
        tokenizer = source.tokenizer()
        if settings.chat:
            tokens, routed_by = chat_tokens(tokenizer, prompt)
        else:
            tokens = routed_by = tokenizer.beginning(prompt)
        context = source.model.sequence_length
        if len(tokens) > context:
            say(f"the prompt has {len(tokens)} tokens, of which the last {context} are read")
        check_paths("--mix", settings.mix, source)
        check_paths("--choose", settings.choose, source)
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
        if not settings.chat:
            print(prompt, end="", flush=True)
        made = generate_tokens(models[0], tokens, settings, models[1:], tokenizer.ends)
        for piece in stream_text(tokenizer, made):
            print(piece, end="", flush=True)
    print(flush=True)
    return 0


COMMAND = Command(
    "dipaco-generate",
    GenerationSettings,
    run,
    description="Route a prompt, load its path alone, and continue the text.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
