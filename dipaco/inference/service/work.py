"""What the model is asked to do, and what comes back: between the requests and the model thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dipaco.inference.sampling import Sampling

from .errors import ApiError
from .loader import PathStates
from .scores import TokenScore
from .texts import AnswerText


@dataclass(frozen=True)
class Began:
    """A path, or several that are mixed, reads the prompt."""

    path: int
    """The path that it is called by; of several the one asked for, or the router's best."""
    paths: tuple[int, ...]
    states: PathStates
    routed: int | None
    """The router's choice, which may be another one, if it could not be had."""


@dataclass(frozen=True)
class PromptScores:
    """The log-probabilities of the prompt's tokens after its first."""

    scores: list[TokenScore]


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer, and where its text begins in it."""

    score: TokenScore
    offset: int


@dataclass(frozen=True)
class Piece:
    """More of an answer. `tokens` are those whose text is sent, if log-probabilities were asked."""

    index: int
    text: str
    paths: tuple[int, ...]
    tokens: list[ScoredToken]


@dataclass(frozen=True)
class Ended:
    """An answer is complete."""

    index: int
    reason: str
    tokens: int


@dataclass(frozen=True)
class Failed:
    """There will be no answer."""

    error: ApiError


Event = Began | PromptScores | Piece | Ended | Failed


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was read, for the other answers to it."""

    of: PathStates
    """Of the path that read it: each time that one is loaded it has others."""
    stored: list[torch.Tensor]
    logits: torch.Tensor
    """Of what comes next, fp32 [V]."""


@dataclass(eq=False)
class Work:
    """A prompt, and how it is to be continued. `emit` is called by the model thread.

    Ends with an `Ended` for each answer, or one `Failed`.
    """

    tokens: list[int]
    path: int | None
    """None: the router chooses."""
    sampling: Sampling
    emit: Callable[[Event], None]
    deadline_s: float
    """By the monotonic clock."""
    answers: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """How many likely tokens are shown beside each; None is no log-probabilities."""
    score_prompt: bool = False
    mix: int = 1
    """So many of the likeliest paths give each token together."""
    slide: bool = False
    """Go on from the newer half of the context when it is full."""
    cancelled: bool = False
    """Nobody waits for it any more."""

    routed_by: list[int] | None = None
    """What the router sees in place of the tokens: of a chat, what the user says first."""
    open_answers: int = 0
    routed: int | None = None
    ranking: list[int] = field(default_factory=list)
    """Paths that suit the prompt less and less, for when one cannot be had."""
    shared: ReadPrompt | None = None


@dataclass(eq=False)
class Answer:
    """One continuation of a prompt, at work or waiting for its path."""

    work: Work
    index: int
    context: list[int]
    generator: torch.Generator
    text: AnswerText
    paths: tuple[int, ...]
    waiting_since_s: float
    started: bool = False
    tokens: int = 0
    unsent: list[ScoredToken] = field(default_factory=list)
    sent: int = 0
