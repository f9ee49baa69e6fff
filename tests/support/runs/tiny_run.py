"""A complete run folder in a second: real tokenizer, router, base model, shards, manifest.

Made directly from generated text, without `dipaco-bootstrap prepare`. Every test that needs a run
starts here:

    run = make_tiny_run(tmp_path / "run", inner_steps=4)
    plan = run.plan()

The text has one made-up language per path, so the router finds the paths and training lowers the
loss. Everything follows from `seed`: the same arguments give the same plan, blob for blob.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch

from dipaco.base.files import canonical_json
from dipaco.bootstrap.invite import invite, note_admission
from dipaco.bootstrap.run_config import adapter_defaults
from dipaco.modules.foreign_model import new_path
from dipaco.modules.frozen_file import write_base
from dipaco.modules.transformer import initialise
from dipaco.protocol.config import (
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    ModelFields,
    OuterConfig,
    RoundsConfig,
)
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from dipaco.protocol.plan import PathShard, RoutingPlan, RunBlobs, RunPlan, ShardIndex
from dipaco.routing.routers.balancing import balance_biases, squared_distances
from dipaco.routing.routers.document_routing import prefix_features
from dipaco.routing.routers.kinds import KMeansRouter, Prefixes
from dipaco.routing.routers.router import standardisation
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.sentencepiece_tokenizer import train_tokenizer
from dipaco.routing.tokens.token_files import scoring_windows, token_dtype
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

TINY_VOCABULARY = 320
TINY_PREFIX_TOKENS = 8


def make_tiny_run(
    folder,
    *,
    modules_per_level=(2, 2),
    private_blocks=(),
    private_embedding=False,
    private_head=False,
    inner_steps=4,
    codec="int4",
    duration_s=600.0,
    start_s=0.0,
    seed=0,
    name="tiny",
    documents_per_path=40,
    validation_documents_per_path=4,
    inner=None,
    outer=None,
    rounds=None,
    contributions=None,
    imported=None,
    adapters=None,
    **model,
):
    """Write a run folder and return it opened.

    `inner_steps` 0 is the clock-driven mode. `inner`, `outer`, `rounds` and `contributions` set
    further fields of those sections of the plan, other keywords those of `ModelConfig`. With
    `imported`, the run begins with that checkpoint; with `adapters` too, these are trained over it.
    The operator's key is `operator.pem` beside the manifest.
    Raises ConfigurationError as these classes do.
    """
    run = RunFolder(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    path_count = int(np.prod(modules_per_level))
    shape = _TINY_MODEL
    if imported is not None:
        length = ModelFields(sequence_length=_TINY_MODEL["sequence_length"])
        shape = imported.agreed_model(length, "make_tiny_run").model_dump()
    model_config = ModelConfig(**{**shape, **model, "adapters": adapters})
    train = tiny_documents(path_count, documents_per_path, seed)
    held_out = tiny_documents(path_count, validation_documents_per_path, seed + 1_000_003)

    base = new_path(model_config.without_adapters)
    if imported is not None and imported.tokenizer is not None:
        tokenizer_bytes = imported.tokenizer
        base.load_state_dict(imported.parameters(), assign=True)
    else:
        tokenizer_bytes = tiny_tokenizer_bytes(model_config.vocabulary_size)
        initialise(base, seed)
    base_sha256, source = "", None
    if imported is not None and adapters is not None:
        file = run.path / "base.safetensors"
        write_base(imported.folder, adapters.base_format, file)
        base_sha256, source = run.blobs.add_file(file, move=True), imported.source("OWNER/tiny")
        base = run.load_base_model(model_config, base_sha256)
    tokenizer = read_tokenizer(tokenizer_bytes)
    base.eval()
    train_tokens = [tokenizer.document_tokens(text) for text in train]
    held_out_tokens = [tokenizer.document_tokens(text) for text in held_out]
    features = prefix_features(base, train_tokens, TINY_PREFIX_TOKENS)
    router = _router_by_language(features, path_count)

    index = _write_shards(run, model_config, base, router, train_tokens, held_out_tokens)
    defaults = adapter_defaults(adapters) if adapters is not None else {}
    plan = RunPlan(
        name=name,
        seed=seed,
        start_s=start_s,
        model=model_config,
        grid=GridConfig(
            modules_per_level=modules_per_level,
            private_blocks=private_blocks,
            private_embedding=private_embedding,
            private_head=private_head,
        ),
        inner=InnerConfig(**{**_TINY_INNER, **defaults.get("inner", {}), **(inner or {})}),
        outer=OuterConfig(**defaults.get("outer", {}), **(outer or {})),
        rounds=RoundsConfig(**{"duration_s": duration_s, "inner_steps": inner_steps, **(rounds or {})}),
        contributions=ContributionsConfig(codec=codec, **(contributions or {})),
        routing=RoutingPlan(kind="kmeans", prefix_tokens=TINY_PREFIX_TOKENS),
        blobs=RunBlobs(
            tokenizer=run.blobs.add_bytes(tokenizer_bytes),
            router=run.blobs.add_bytes(router.to_bytes()),
            base=base_sha256 or run.blobs.add_bytes(safetensors.torch.save(tiny_parameters(base))),
            shards=run.blobs.add_bytes(canonical_json(index.model_dump(mode="json"))),
        ),
        base_source=source,
    )
    sign_tiny_run(run, plan)
    return run


def sign_tiny_run(run, plan, *, by_invitation=False):
    """Sign `plan` with the run's operator key and write it as the manifest; returns what was
    signed. Unless it is by invitation, everybody is in.

    For tests that change a plan, for instance to start it now.
    """
    key = load_or_create_operator_key(run.path / "operator.pem")
    plan = plan.model_copy(update={"admission": None})
    if not by_invitation:
        plan = opened(plan, key)
    run.manifest_path.write_bytes(sign_manifest(plan, key))
    return plan


def invited_tiny_run(run, *, places, **changes):
    """Sign the plan again, with changes and for the invited only; returns an invitation."""
    plan = sign_tiny_run(run, run.plan().model_copy(update=changes), by_invitation=True)
    key = load_or_create_operator_key(run.path / "operator.pem")
    note_admission(run.path, plan, key, lambda line: None)
    return invite(run.path, places)


def tiny_shard(run, model, path, rows, validation, documents):
    """Put a path's training rows and scoring windows [N, T] into the blobs and describe them."""
    dtype = token_dtype(model.vocabulary_size)
    return PathShard(
        path=path,
        train_sha256=run.blobs.add_bytes(rows.astype(dtype).tobytes()),
        train_sequences=len(rows),
        train_documents=documents,
        validation_sha256=run.blobs.add_bytes(validation.astype(dtype).tobytes()),
        validation_sequences=len(validation),
    )


def tiny_parameters(model):
    """Return copies of a model's parameters, fp32 on the CPU, each in its own memory."""
    return {name: parameter.detach().float().cpu().clone() for name, parameter in model.named_parameters()}


def tiny_documents(languages, documents_per_language, seed):
    """Return documents of about 60 words, one language after the other: deterministic.

    A document of language `i` stands at `i * documents_per_language` and behind.
    """
    return [
        _document(language, np.random.default_rng((seed, language, number)))
        for language in range(languages)
        for number in range(documents_per_language)
    ]


# Options of `make_tiny_run` for a run with path-specific modules of every kind but the head.
PRIVATE = {"private_blocks": (0, 3), "private_embedding": True}
_TINY_MODEL = {
    "vocabulary_size": TINY_VOCABULARY,
    "block_count": 4,
    "hidden_size": 16,
    "head_count": 2,
    "feed_forward_size": 32,
    "sequence_length": 32,
}
_TINY_INNER = {"learning_rate": 3e-3, "batch_sequences": 2, "warmup_steps": 2, "fresh_state_warmup_steps": 2}
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"


@functools.lru_cache(maxsize=64)
def _words(language):
    """Return the dozen words of a language, made of its own few syllables."""
    random = np.random.default_rng((77, language))
    syllables = [str(random.choice(list(_CONSONANTS))) + str(random.choice(list(_VOWELS))) for _ in range(4)]
    return tuple(
        "".join(str(part) for part in random.choice(syllables, size=int(random.integers(2, 4)))) for _ in range(12)
    )


def _document(language, random):
    """Return a text in which some words are likelier to follow others."""
    words = _words(language)
    position, text = int(random.integers(len(words))), []
    for _ in range(60):
        step = int(random.choice([1, 2, 5], p=[0.6, 0.3, 0.1]))
        position = (position + step) % len(words)
        text.append(words[position])
    return " ".join(text) + ".\n"


@functools.lru_cache(maxsize=4)
def tiny_tokenizer_bytes(vocabulary_size):
    """Train the tokenizer once per process; it is the same for every tiny run of that size."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tokenizer.model"
        train_tokenizer(tiny_documents(8, 6, seed=0), vocabulary_size, output, character_limit=100_000, seed=0)
        return output.read_bytes()


def _router_by_language(features, languages):
    """Return a router with a centroid for each language: the mean of its documents' features."""
    mean, scale, points = standardisation(features)
    centroids = points.reshape(languages, -1, points.shape[1]).mean(axis=1)
    biases = balance_biases(squared_distances(points, centroids), np.ones(len(points)))
    return KMeansRouter(mean, scale, centroids, biases)


def _write_shards(run, model, base, router, train, held_out):
    """Route the documents and write each path's token files into the blobs."""
    length = model.sequence_length
    train_paths = router.route(Prefixes(prefix_features(base, train, TINY_PREFIX_TOKENS)))
    held_out_paths = router.route(Prefixes(prefix_features(base, held_out, TINY_PREFIX_TOKENS)))
    shards = []
    for path in range(router.path_count):
        own = [document for document, at in zip(train, train_paths, strict=True) if at == path]
        stream = np.array([token for document in own for token in document], dtype=np.int64)
        rows = stream[: len(stream) // length * length].reshape(-1, length)
        assert len(rows), f"the tiny run has no text for path {path}; choose another seed"
        windows = [
            scoring_windows(document, length, TINY_PREFIX_TOKENS, model.padding_token)
            for document, at in zip(held_out, held_out_paths, strict=True)
            if at == path
        ]
        validation = np.concatenate([np.empty((0, length), dtype=np.int64), *windows])
        shards.append(tiny_shard(run, model, path, rows, validation, len(own)))
    return ShardIndex(sequence_length=length, paths=tuple(shards))
