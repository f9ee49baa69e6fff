"""A valid plan without any files, for tests that only need its numbers."""

from dipaco.protocol.config import ContributionsConfig, GridConfig, InnerConfig, ModelConfig, OuterConfig, RoundsConfig
from dipaco.protocol.plan import RoutingPlan, RunBlobs, RunPlan


def make_plan(*, duration_s=100.0, grid=None, **fields):
    """Return a plan of a small 2x2 run that starts at 1000 s; `fields` replace its others."""
    values = {
        "name": "test",
        "start_s": 1000.0,
        "model": ModelConfig(vocabulary_size=64, block_count=4, hidden_size=8, head_count=1, sequence_length=16),
        "grid": grid or GridConfig(modules_per_level=(2, 2)),
        "inner": InnerConfig(batch_sequences=2),
        "outer": OuterConfig(),
        "rounds": RoundsConfig(duration_s=duration_s),
        "contributions": ContributionsConfig(),
        "routing": RoutingPlan(),
        "blobs": RunBlobs(tokenizer="1" * 64, router="2" * 64, base="3" * 64, shards="4" * 64),
        **fields,
    }
    return RunPlan(**values)
