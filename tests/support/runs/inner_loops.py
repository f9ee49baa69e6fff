"""Small models, inner loops and batches for tests of training."""

import torch

from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import InnerConfig, ModelConfig
from dipaco.training.inner import InnerLoop

CPU = torch.device("cpu")
MODEL = ModelConfig(vocabulary_size=64, block_count=2, hidden_size=16, head_count=2, sequence_length=16)


def config_of(**overrides):
    values = {"learning_rate": 1e-2, "batch_sequences": 4, "fresh_state_warmup_steps": 0}
    return InnerConfig(**{**values, **overrides})


def model_of(model=MODEL, cls=PathModel):
    path_model = cls(model)
    initialise(path_model, 0)
    return path_model


def loop_of(model=None, **overrides):
    arguments = {
        key: overrides.pop(key)
        for key in ("optimizer", "micro_batch_size", "compile_model", "exact")
        if key in overrides
    }
    return InnerLoop(model or model_of(), config_of(**overrides), CPU, **arguments)


def batch_of(seed=0, rows=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 64, (rows, 16), generator=generator)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
