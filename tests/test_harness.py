"""What the harness is told: each request by the path of its context, scored as the path alone does.

The harness itself is no part of these tests: `benchmarks/model/harness_agreement.py` runs it.
"""

from __future__ import annotations

import pytest
import torch
from dipaco.inference.generate import generate_tokens, prompt_tokens, stream_text
from dipaco.inference.harness import (
    HarnessModel,
    Pair,
    best_paths,
    model_in_use,
    names_of_models,
    names_of_tasks,
)
from dipaco.inference.sampling import Sampling
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.transformer import token_losses
from support.service import trained_run
from support.tiny_run import tiny_documents

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HarnessModel:
    out = trained_run(tmp_path_factory.mktemp("harness"))
    return HarnessModel(DiskSource(out), CPU, rows=3)


def test_pairs_are_scored_by_the_path_of_their_context(model: HarnessModel) -> None:
    texts = [prompt_tokens(model.tokenizer, text) for text in tiny_documents(4, 2, 5)]
    cuts = [9, 17, 3, 30, 12, 8, 21, 40]
    pairs = [
        Pair(tuple(text[:cut]), tuple(text[cut : cut + 1 + cut % 5]))
        for text, cut in zip(texts, cuts, strict=True)
    ]
    for use in ("routed", 2, "base"):
        model.use = use
        found = model.scores(pairs)
        paths = model.paths_of([pair.context for pair in pairs])
        if use == "routed":
            assert len(set(paths)) > 1
        for pair, path, (score, greedy) in zip(pairs, paths, found, strict=True):
            one = model.source.base_model(CPU)
            if path != "base":
                one = assemble_path(model.source, int(path))
            tokens = torch.tensor([[*pair.context, *pair.continuation]])
            with torch.no_grad():
                logits = one(tokens)
                losses = token_losses(logits, tokens)[0]
            count = len(pair.continuation)
            assert score == pytest.approx(-float(losses[-count:].sum()), abs=1e-4)
            likeliest = logits[0, -count - 1 : -1].argmax(-1).tolist()
            assert greedy == (likeliest == list(pair.continuation))


def test_what_does_not_fit_is_cut_off_at_the_beginning(model: HarnessModel) -> None:
    model.use = 1
    tokens = prompt_tokens(model.tokenizer, tiny_documents(4, 1, 5)[0])[: model.longest + 30]
    long = Pair(tuple(tokens[:-2]), tuple(tokens[-2:]))
    short = Pair(tuple(tokens[-model.longest - 1 : -2]), tuple(tokens[-2:]))
    first, second = model.scores([long, short])
    assert first[0] == pytest.approx(second[0], abs=1e-5)


def test_continuations_are_those_of_generate(model: HarnessModel) -> None:
    model.use = "routed"
    prompts = [prompt_tokens(model.tokenizer, text[:12]) for text in tiny_documents(4, 1, 5)]
    whole = model.continuations(prompts, [[]] * 4, [12] * 4)
    for prompt, path, text in zip(prompts, model.paths_of(prompts), whole, strict=True):
        one = assemble_path(model.source, int(path))
        tokens = generate_tokens(one, prompt, Sampling(temperature=0, max_tokens=12))
        assert text == "".join(stream_text(model.tokenizer, tokens))
    stop = whole[1][3:5]
    assert model.continuations(prompts[1:2], [["none", stop]], [12]) == [
        whole[1][: whole[1].find(stop)]
    ]


def test_what_is_evaluated_and_the_best_of_it() -> None:
    names = ["routed", "path-0", "path-1", "base"]
    assert names_of_models("routed, paths,1,base", 2) == names
    with pytest.raises(ConfigurationError, match="0 to 1"):
        names_of_models("routed,2", 2)
    assert [model_in_use(name, 2) for name in ("routed", "base", "1", "path-0")] == [
        "routed", "base", 1, 0,
    ]  # fmt: skip
    for name in ("2", "path-2", "rooted", ""):
        with pytest.raises(ConfigurationError, match="routed, base, or 0 to 1"):
            model_in_use(name, 2)
    assert names_of_tasks("a, b,a", {"a", "b"}.__contains__) == ["a", "b"]
    for tasks in ("a,c", "", "a,,b"):
        with pytest.raises(ConfigurationError, match="--tasks"):
            names_of_tasks(tasks, {"a", "b"}.__contains__)
    results = {
        "routed": {"task": {"acc": 0.9, "loss": 1.0}},
        "path-0": {"task": {"acc": 0.5, "loss": 2.0}},
        "path-1": {"task": {"acc": 0.4, "loss": 1.5}},
    }
    assert best_paths(results, {"task": {"acc": True, "loss": False}}) == {
        "best path": {"task": {"acc": 0.5, "loss": 1.5}}
    }
    assert best_paths({"routed": {}}, {}) == {}
