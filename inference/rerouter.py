"""The rerouter: a small transformer that says which path suits the next W tokens (section 2.4.3).

It begins as the run's base LM, or its first blocks, and has at every position one linear head for
each look-ahead window. Its file is a safetensors file that names the run it was fitted for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dipaco.base.errors import ConfigurationError, IntegrityError, StorageError
from dipaco.base.files import storage_errors
from dipaco.modules.canonical_file import read_arrays, write_arrays
from dipaco.modules.config import ModelConfig
from dipaco.modules.device import autocast_for
from dipaco.modules.plan import RunPlan
from dipaco.modules.transformer import PathModel

from .document_windows import DocumentWindows
from .rerouting import GREATEST_WINDOW, STAY, Decisions, choose_paths, decisions
from .token_losses import length_batches, row_tensor

REROUTER_FORMAT = "dipaco-rerouter/1"
REROUTER_FILE = "rerouter.safetensors"
DEFAULT_WINDOWS = (16, 32, 64, 128, 256, 512, 1024)
_MOST_WINDOWS = 64
# How much likelier than any other path the routed one is at the start, as a logit.
_FIRST_PRIOR = 2.0


@dataclass(frozen=True)
class WindowPolicy:
    """How paths are chosen when rerouting every `window` tokens; found on held-out documents."""

    window: int
    head: int
    """The look-ahead window whose head decides."""
    stay_bonus: float
    """A path is left only for a logit greater by more than this; `STAY` never leaves."""


class Rerouter(nn.Module):
    """Tokens and the routed path in, at each position a logit for each window and path out.

    `blocks` of the run's model are used. At first the heads are zero and the routed path is the
    likeliest: what is learnt is when to leave it.
    """

    def __init__(
        self, model: ModelConfig, *, blocks: int, windows: Sequence[int], path_count: int
    ) -> None:
        super().__init__()
        self.windows = check_windows(windows)
        self.path_count = path_count
        if not 1 <= blocks <= model.block_count:
            raise ConfigurationError(
                f"a rerouter of {blocks} blocks cannot be made of a base model of "
                f"{model.block_count}; give --blocks 1 to {model.block_count}"
            )
        # With a tied embedding there is no output head, which a rerouter has no use for.
        shape = model.model_copy(update={"block_count": blocks, "tied_embedding": True})
        self.backbone = PathModel(shape)
        count = len(self.windows)
        self.head = nn.Parameter(torch.zeros(count * path_count, 2 * model.hidden_size))
        stay = _FIRST_PRIOR * torch.eye(path_count).repeat(1, count)
        self.prior = nn.Parameter(stay)
        self.policies: tuple[WindowPolicy, ...] = tuple(
            WindowPolicy(window, window, 0.0) for window in self.windows
        )

    def load_base(self, base: PathModel) -> None:
        """Copy embedding, blocks and norm of the base model."""
        parameters = dict(base.named_parameters())
        with torch.no_grad():
            for name, parameter in self.backbone.named_parameters():
                parameter.copy_(parameters[name])

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what heads see at every position of `tokens` [B, T], [B, T, 2H]: the normalised
        state there, and the mean of those so far, which is what the run's routers look at."""
        states = self.backbone.model.norm(self.backbone.hidden_states(tokens)).float()
        seen = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return torch.cat((states, states.cumsum(dim=1) / seen[:, None]), dim=-1)

    def logits(self, hidden: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return fp32 [..., windows, paths] for states [..., 2H] of documents routed to [...]."""
        logits = F.linear(hidden, self.head).float() + self.prior[routed]
        return logits.unflatten(-1, (len(self.windows), self.path_count))

    def policy(self, window: int) -> WindowPolicy:
        """Return the policy for rerouting every `window` tokens: that of the nearest window."""
        return min(self.policies, key=lambda own: (abs(math.log(own.window / window)), own.window))

    @torch.no_grad()
    def next_path(
        self, tokens: Sequence[int], routed: int, current: int, window: int, allowed: np.ndarray
    ) -> int:
        """Return the path for the `window` tokens after `tokens`, whose last ones are read."""
        device = self.head.device
        policy = self.policy(window)
        seen = list(tokens)[-self.backbone.config.sequence_length :]
        with autocast_for(device):
            hidden = self.hidden_states(torch.tensor([seen], device=device))[:, -1]
        logits = self.logits(hidden, torch.tensor([routed], device=device))
        own = logits[:, self.windows.index(policy.head)].cpu().numpy()
        made = Decisions(*(np.zeros(1, dtype=np.int64) for _ in range(3)))
        return int(choose_paths(own, made, np.array([current]), policy.stay_bonus, allowed)[0])

    def choose(
        self,
        documents: DocumentWindows,
        windows: Sequence[int],
        allowed: np.ndarray | None = None,
    ) -> dict[int, np.ndarray]:
        """Return the choices, int64 [D], of rerouting every W tokens, for each W of `windows`.

        One pass of the rerouter over the documents serves all windows; the logits of the decisions
        are held in memory.
        """
        policies = {window: self.policy(window) for window in windows}
        found = decision_logits(self, documents, {w: [p.head] for w, p in policies.items()})
        return {
            window: choose_paths(
                found[window][:, 0],
                decisions(documents, window),
                documents.paths,
                policies[window].stay_bonus,
                allowed,
            )
            for window in windows
        }


@torch.no_grad()
def decision_logits(
    rerouter: Rerouter,
    documents: DocumentWindows,
    wanted: Mapping[int, Sequence[int]],
    rows: np.ndarray | None = None,
) -> dict[int, np.ndarray]:
    """Return, for each window W of `wanted`, the logits of its heads, fp32 [D, heads, paths].

    The decisions are those of `decisions(documents, W)`; the heads are named by their windows.
    Decisions in other rows than the given ones stay zero.
    """
    device = rerouter.head.device
    columns = {w: [rerouter.windows.index(head) for head in heads] for w, heads in wanted.items()}
    firsts = {w: _first_decisions(documents, w) for w in wanted}
    found = {
        w: np.zeros((int(firsts[w][-1]), len(heads), rerouter.path_count), dtype=np.float32)
        for w, heads in columns.items()
    }
    chosen = np.arange(len(documents.rows)) if rows is None else rows
    row_documents = documents.row_documents
    width = rerouter.backbone.config.feed_forward
    for batch in length_batches(documents.row_tokens, chosen, width, device):
        with autocast_for(device):
            hidden = rerouter.hidden_states(row_tensor(documents, batch).to(device))
        for window, heads in columns.items():
            places, positions = _decisions_in_rows(documents, batch, row_documents[batch], window)
            if not len(places):
                continue
            own = row_documents[batch][places]
            offsets = documents.row_starts[batch][places] - documents.token_starts[own]
            numbers = firsts[window][own] + (offsets + positions) // window
            # The state of the last token that is seen decides on the next one.
            states = hidden[places, positions + documents.prefix_tokens - 1]
            routed = torch.from_numpy(documents.paths[own]).to(device)
            found[window][numbers] = rerouter.logits(states, routed)[:, heads].cpu().numpy()
    return found


def _first_decisions(documents: DocumentWindows, window: int) -> np.ndarray:
    """Return the number of each document's first decision, int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(-(-documents.document_tokens // window))]).astype(int)


def _decisions_in_rows(
    documents: DocumentWindows, rows: np.ndarray, row_documents: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the decisions that fall into rows: the place of the row and the scored position."""
    offsets = documents.row_starts[rows] - documents.token_starts[row_documents]
    counts = documents.row_tokens[rows] - documents.prefix_tokens
    found: Iterator[np.ndarray] = (
        np.arange(-offset % window, count, window)
        for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True)
    )
    positions = list(found)
    places = np.repeat(np.arange(len(rows)), [len(own) for own in positions])
    return places, np.concatenate(positions)


def check_windows(windows: Sequence[int]) -> tuple[int, ...]:
    """Return windows in ascending order. Raises ConfigurationError for an impossible one."""
    if not windows or len(windows) > _MOST_WINDOWS:
        raise ConfigurationError(f"give 1 to {_MOST_WINDOWS} windows, such as 16,64,256")
    for window in windows:
        if not 1 <= window <= GREATEST_WINDOW:
            raise ConfigurationError(
                f"a window of {window} tokens is impossible; give 1 to {GREATEST_WINDOW}, such as "
                f"16,64,256"
            )
    return tuple(sorted(set(windows)))


# -- the file


def rerouter_bytes(rerouter: Rerouter, plan: RunPlan) -> bytes:
    """Return the rerouter file: fp32, the same bytes for the same rerouter."""
    tensors = {
        name: parameter.detach().to("cpu", torch.float32).contiguous()
        for name, parameter in sorted(rerouter.named_parameters())
    }
    header = {
        "format": REROUTER_FORMAT,
        "run": plan.run_id,
        "base": plan.blobs.base,
        "paths": rerouter.path_count,
        "prefix_tokens": plan.routing.prefix_tokens,
        "blocks": rerouter.backbone.config.block_count,
        "windows": list(rerouter.windows),
        "policies": [
            {
                "window": own.window,
                "head": own.head,
                "stay_bonus": None if own.stay_bonus == STAY else own.stay_bonus,
            }
            for own in rerouter.policies
        ],
        "sha256": _tensors_sha256(tensors),
    }
    return write_arrays({n: tensor.numpy() for n, tensor in tensors.items()}, "rerouter", header)


def read_rerouter(file: Path | None, state_folder: Path | None, plan: RunPlan) -> Rerouter:
    """Read the rerouter that a user names, or the one beside the states on disk.

    Raises StorageError and ConfigurationError, saying how to make one, and as `load_rerouter`.
    """
    if file is None:
        if state_folder is None:
            raise ConfigurationError(
                "rerouting in a live swarm needs --rerouter FILE; 'dipaco-reroute fit "
                "--initial-peers ADDRESS --out FILE' makes one"
            )
        file = state_folder / REROUTER_FILE
    if not file.is_file():
        raise StorageError(
            f"there is no rerouter {file}; make one with 'dipaco-reroute fit', or name it with "
            f"--rerouter FILE"
        )
    with storage_errors(file.parent):
        data = file.read_bytes()
    return load_rerouter(data, plan, str(file))


def load_rerouter(data: bytes, plan: RunPlan, source: str = "the rerouter file") -> Rerouter:
    """Read a rerouter file for the run of `plan`, on the CPU and in evaluation mode.

    Raises IntegrityError, naming `source`, if it is broken or its content does not have the hash
    that it names, ConfigurationError if it belongs to another run.
    """
    header, arrays = read_arrays(data, "rerouter", REROUTER_FORMAT, source)
    try:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        _check_header(header, plan, source)
        if header["sha256"] != _tensors_sha256(tensors):
            raise ValueError("its parameters do not have the hash that it names")
        return _rebuilt(header, tensors, plan)
    except ConfigurationError as error:
        # Only a header of another run is the user's mistake; impossible sizes are damage.
        if header.get("run") != plan.run_id:
            raise
        raise IntegrityError(f"{source} is broken: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"{source} is broken: {error}") from None


def _check_header(header: Mapping[str, Any], plan: RunPlan, source: str) -> None:
    if header["run"] != plan.run_id:
        raise ConfigurationError(
            f"{source} was fitted for run {str(header['run'])[:16]}, this is run {plan.run_id}; "
            f"fit one for it with 'dipaco-reroute fit'"
        )
    expected = (plan.blobs.base, plan.routing.prefix_tokens, math.prod(plan.grid.modules_per_level))
    if (header["base"], header["prefix_tokens"], header["paths"]) != expected:
        raise ValueError("base model, prefix or paths are not those of its run")


def _rebuilt(header: dict[str, Any], tensors: dict[str, torch.Tensor], plan: RunPlan) -> Rerouter:
    rerouter = Rerouter(
        plan.model,
        blocks=int(header["blocks"]),
        windows=[int(window) for window in header["windows"]],
        path_count=int(header["paths"]),
    )
    parameters = dict(rerouter.named_parameters())
    if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in tensors.items()}:
        raise ValueError("its parameters do not have the shapes that its header says")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} is not finite")
            parameters[name].copy_(tensor)
    policies = []
    for own in header["policies"]:
        bonus = STAY if own["stay_bonus"] is None else float(own["stay_bonus"])
        policy = WindowPolicy(int(own["window"]), int(own["head"]), bonus)
        if policy.window not in rerouter.windows or policy.head not in rerouter.windows:
            raise ValueError("a policy names a window that it does not have")
        if not bonus >= 0:
            raise ValueError("a stay_bonus is negative or no number")
        policies.append(policy)
    if [policy.window for policy in policies] != list(rerouter.windows):
        raise ValueError("it needs one policy for each window")
    rerouter.policies = tuple(policies)
    return rerouter.eval()


def _tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
