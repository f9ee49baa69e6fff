"""Hundreds of paths over one base: the base and the room for texts are in memory once, and texts of
different paths get their tokens together, each through its own path's adapters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch

from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import AdaptersConfig

from .decoder import Decoder, decoder_bytes
from .low_rank import PathAdapters


class SharedDecoder:
    """A base, and slots that its paths take and give back. Used by one thread at a time, but for
    `path`, which any thread may call."""

    def __init__(
        self, base: PathModel, scale: float, slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.decoder = Decoder(base, slots, dtype)
        parameters = base_parameter_count(base.config)
        self.size_bytes = decoder_bytes(base.config, parameters, slots, dtype)
        """What base and caches take."""
        self.free = set(range(slots))
        self._scale = scale
        # Paths that share a module share its adapters.
        self._modules: weakref.WeakValueDictionary[str, _ModuleAdapters] = (
            weakref.WeakValueDictionary()
        )

    def path(self, states: Mapping[str, ModuleState]) -> AdapterDecoder:
        """Return what gives tokens by the path of these modules."""
        return AdapterDecoder(self, [self._module(state) for state in states.values()])

    @torch.no_grad()
    def path_of(self, parameters: Mapping[str, torch.Tensor]) -> AdapterDecoder:
        """Return what gives tokens by the path with these adapters, named as in the model."""
        blocks = self.decoder.path_adapters(parameters, self._scale)
        return AdapterDecoder(self, [_ModuleAdapters(blocks)])

    @torch.no_grad()
    def _module(self, state: ModuleState) -> _ModuleAdapters:
        name = f"{state.module} {state.digest}"
        found = self._modules.get(name)
        if found is None:
            tensors = state.layout.views(state.parameters)
            found = _ModuleAdapters(self.decoder.path_adapters(tensors, self._scale))
            self._modules[name] = found
        return found


def shared_decoder(base: PathModel, adapters: AdaptersConfig, slots: int) -> SharedDecoder:
    """Return a decoder for all paths of a run, on the device of its base. A GPU holds the weights
    in 16 bits, if the run's base has no more."""
    is_16_bit = base.device.type != "cpu" and adapters.base_format != "float32"
    dtype = torch.bfloat16 if is_16_bit else torch.float32
    return SharedDecoder(base, adapters.scale, slots, dtype)


def decoders_over_one_base(models: Sequence[PathModel], slots: int) -> list[AdapterDecoder]:
    """Return decoders, with so many slots each, of paths whose base is one."""
    base, adapters = models[0].base, models[0].config.adapters
    assert base is not None
    assert adapters is not None
    whole = PathModel(models[0].config.without_adapters, base)
    shared = shared_decoder(whole, adapters, slots * len(models))
    return [shared.path_of(dict(model.named_parameters())) for model in models]


class _ModuleAdapters:
    """The adapters of one module."""

    def __init__(self, blocks: PathAdapters) -> None:
        self.blocks = blocks


class AdapterDecoder:
    """One path over a shared base; used as `Decoder` is."""

    def __init__(self, shared: SharedDecoder, modules: Sequence[_ModuleAdapters]) -> None:
        self.config = shared.decoder.config
        self.shared = shared
        self._modules = modules  # held, so that other paths find them
        self._adapters = {n: own for module in modules for n, own in module.blocks.items()}
        self._places: list[int | None] = [None] * len(shared.decoder.lengths)

    @property
    def lengths(self) -> list[int]:
        """As `PathDecoder.lengths`."""
        stored = self.shared.decoder.lengths
        return [0 if place is None else stored[place] for place in self._places]

    @property
    def free_slots(self) -> int:
        """How many texts more can be taken, by any path."""
        return len(self.shared.free)

    def read(
        self, slot: int, tokens: Sequence[int], *, every: bool = False
    ) -> Iterator[torch.Tensor]:
        """As `Decoder.read`. There must be room."""
        return self.shared.decoder.read(self._take(slot), tokens, every=every)

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """As `Decoder.step`."""
        return step_together([self], [tokens])[0]

    def copy(self, slot: int, length: int) -> list[torch.Tensor]:
        """As `Decoder.copy`."""
        return self.shared.decoder.copy(self._take(slot), length)

    def paste(self, slot: int, text: list[torch.Tensor]) -> None:
        """As `Decoder.paste`. There must be room."""
        self.shared.decoder.paste(self._take(slot), text)

    def free(self, slot: int) -> None:
        """As `Decoder.free`."""
        place, self._places[slot] = self._places[slot], None
        if place is not None:
            self.shared.decoder.free(place)
            self.shared.free.add(place)

    def _take(self, slot: int) -> int:
        """Return the shared slot of one of this path's."""
        place = self._places[slot]
        if place is None:
            # The first free one: few texts make a narrow step.
            place = self._places[slot] = min(self.shared.free)
            self.shared.free.remove(place)
            self.shared.decoder.adapters[place] = self._adapters
        return place

    def placed(self, tokens: Sequence[int | None]) -> dict[int, tuple[int, int]]:
        """Return for each shared slot that gets a token the own slot, and the token."""
        return {
            place: (slot, token)
            for slot, (place, token) in enumerate(zip(self._places, tokens, strict=False))
            if place is not None and token is not None
        }


def step_together(
    paths: Sequence[AdapterDecoder], tokens: Sequence[Sequence[int | None]]
) -> list[torch.Tensor]:
    """Add tokens to the texts of several paths of one base in a single step; return what
    `Decoder.step` does for each of them."""
    placed = [path.placed(own) for path, own in zip(paths, tokens, strict=True)]
    given = {place: token for own in placed for place, (_, token) in own.items()}
    logits = paths[0].shared.decoder.step([given.get(n) for n in range(max(given) + 1)])
    found = []
    for own, asked in zip(placed, tokens, strict=True):
        rows = logits.new_zeros(len(asked), logits.shape[1])
        for place, (slot, _) in own.items():
            rows[slot] = logits[place]
        found.append(rows)
    return found
