"""The rerouter: a transformer that chooses the path anew every W tokens (section 2.4.3).

It begins as the run's base model and has, at every position, a linear head over the paths. One
rerouter serves any W. Its file is a safetensors file that names the run it was fitted for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from dipaco.base.errors import ConfigurationError, IntegrityError, StorageError
from dipaco.base.files import storage_errors
from dipaco.modules.canonical_file import read_arrays, write_arrays
from dipaco.modules.device import autocast_for
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.plan import RunPlan

from .document_windows import DocumentWindows
from .token_losses import length_batches, row_tensor

_REROUTER_FORMAT = "dipaco-rerouter/2"
# How much likelier than any other path the routed one is at first, as a logit.
_FIRST_PREFERENCE = 2.0


class Rerouter(nn.Module):
    """Tokens [B, T] and the path that each text was routed to [B] in, fp32 logits of the paths
    [B, T, P] at every position out.

    At first the head is zero and the routed path is the likeliest: training learns when to leave
    it.
    """

    def __init__(self, model: ModelConfig, path_count: int) -> None:
        super().__init__()
        # With a tied embedding there is no output head; a rerouter needs none.
        whole = model.without_adapters.model_copy(update={"tied_embedding": True})
        self.backbone = PathModel(whole)
        self.head = nn.Linear(2 * model.hidden_size, path_count)
        self.routed = nn.Parameter(_FIRST_PREFERENCE * torch.eye(path_count))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def path_count(self) -> int:
        """How many paths there are to choose from."""
        return len(self.routed)

    def load_base(self, base: PathModel) -> None:
        """Copy embedding, blocks and norm of the base model."""
        parameters = base.whole_parameters()
        with torch.no_grad():
            for name, parameter in self.backbone.named_parameters():
                parameter.copy_(parameters[name])

    def forward(self, tokens: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return the logits. A position sees the tokens up to and including its own."""
        device = self.routed.device
        with autocast_for(device):
            states = self.backbone.hidden_states(tokens.to(device))
        states = self.backbone.model.norm(states).float()
        # The mean of the states so far is what the run's routers look at.
        seen = torch.arange(1, tokens.shape[1] + 1, device=device)
        means = states.cumsum(dim=1) / seen[:, None]
        logits: torch.Tensor = self.head(torch.cat((states, means), dim=-1))
        return logits + self.routed[routed.to(device)].unsqueeze(1)


def decided_at(targets: int, prefix_tokens: int, window: int) -> np.ndarray:
    """Return where the path of each target of a sequence was chosen, int64 [targets].

    Target t is the token after position t. The first choice is made when the routing prefix has
    been read, the next ones every `window` tokens. Targets in the prefix have the first one.
    """
    since = np.maximum(np.arange(targets) - (prefix_tokens - 1), 0)
    return prefix_tokens - 1 + since // window * window


@torch.no_grad()
def rerouted_nats(
    rerouter: Rerouter,
    windows: DocumentWindows,
    nats: np.ndarray,
    paths: np.ndarray,
    batch: np.ndarray,
    window: int,
) -> np.ndarray:
    """Return what each target of some rows costs by the path chosen last, fp32 [B, L - 1].

    `nats` [K, B, L - 1] are those of the rows by the `paths` [B, K], among which is chosen.
    """
    targets = nats.shape[2]
    found = np.zeros(nats.shape[1:], dtype=np.float32)
    routed = torch.from_numpy(windows.paths[windows.row_documents[batch]])
    width = rerouter.backbone.config.feed_forward
    everyone = np.arange(len(batch))
    for part in length_batches(windows.row_tokens[batch], everyone, width, rerouter.routed.device):
        logits = rerouter(row_tensor(windows, batch[part]), routed[part]).cpu().numpy()
        length = min(logits.shape[1] - 1, targets)
        places = decided_at(length, windows.prefix_tokens, window)
        own = np.take_along_axis(logits[:, places], paths[part][:, None, :], axis=2)
        chosen = own.argmax(axis=2)
        found[part, :length] = np.take_along_axis(nats[:, part, :length], chosen[None], axis=0)[0]
    return found


# -- the file


def rerouter_bytes(rerouter: Rerouter, plan: RunPlan) -> bytes:
    """Return the rerouter's file: fp32, the same bytes for the same rerouter."""
    arrays = {
        name: parameter.detach().to("cpu", torch.float32).contiguous().numpy()
        for name, parameter in sorted(rerouter.named_parameters())
    }
    return write_arrays(arrays, "rerouter", {"format": _REROUTER_FORMAT, "run": plan.run_id})


def read_rerouter(file: Path, plan: RunPlan) -> Rerouter:
    """Read a rerouter for the run of `plan`, on the CPU and in evaluation mode.

    Raises StorageError if there is no such file, IntegrityError if it is broken, and
    ConfigurationError if it was fitted for another run.
    """
    if not file.is_file():
        raise StorageError(
            f"there is no rerouter {file}; make one with "
            f"'dipaco-eval --data TEXTS --fit-rerouter {file}'"
        )
    with storage_errors(file.parent):
        content, arrays = read_arrays(file.read_bytes(), "rerouter", _REROUTER_FORMAT, str(file))
    if content.get("run") != plan.run_id:
        raise ConfigurationError(
            f"{file} was fitted for run {str(content.get('run'))[:16]}, this is run "
            f"{plan.run_id}; fit one for it with --fit-rerouter"
        )
    rerouter = Rerouter(plan.model, plan.grid.path_count)
    try:
        rerouter.load_state_dict({n: torch.from_numpy(array) for n, array in arrays.items()})
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise IntegrityError(f"{file} is not a rerouter of its run: {reason}") from None
    if not all(bool(parameter.isfinite().all()) for parameter in rerouter.parameters()):
        raise IntegrityError(f"{file} is broken: a parameter is not finite")
    return rerouter.eval()
