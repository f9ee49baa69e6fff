"""What an export says about its router: how a text finds its path, and how evenly texts did."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.plan import ShardIndex
from dipaco.routing.routers.router import Router

# A tokenizer whose numbers in the files are not those of the run: routers see those of the run.
RUN_TOKENIZER = "tokenizer.dipaco"


def routing_figures(index: ShardIndex) -> dict[str, Any]:
    """Return how large the shards are that the router made: in training and held-out sequences."""
    total = sum(shard.train_sequences for shard in index.paths)
    shares = [shard.train_sequences / max(1, total) for shard in index.paths]
    return {
        "sequence_length": index.sequence_length,
        "train_sequences": total,
        "largest_over_mean": max(shares) * len(shares),
        "smallest_over_mean": min(shares) * len(shares),
        "paths": [
            {
                "path": shard.path,
                "train_documents": shard.train_documents,
                "train_sequences": shard.train_sequences,
                "share": share,
                "validation_sequences": shard.validation_sequences,
            }
            for shard, share in zip(index.paths, shares, strict=True)
        ],
    }


def router_readme(router: Router, prefix_tokens: int, *, renumbered: bool) -> str:
    """Return how to find the path of a text with the files beside it.

    `renumbered`: tokens have other numbers in the exported tokenizer than in the run.
    """
    needs_features = router.needs_features
    sees = "the mean of the base model's last hidden states over" if needs_features else "only"
    return "\n".join(
        [
            f"# Routing: a router of kind `{router.kind}`, {router.path_count} paths",
            "",
            f"A document goes to one path, for good, by its first {prefix_tokens} tokens (its "
            f"beginning `<s>` among them). This kind of router sees {sees} these tokens"
            f"{' and the label of the document' if router.needs_labels else ''}. From the folder "
            f"above this one, with `dipaco` installed (for the router file alone):",
            "",
            "```python",
            *_routing_program(router, prefix_tokens, renumbered=renumbered),
            "```",
            "",
            "Compute in fp32, as here: everybody who routes must come to the same path. "
            "`routing.json` says how many training documents and sequences each path got.",
            "",
        ]
    )


def _routing_program(router: Router, prefix_tokens: int, *, renumbered: bool) -> list[str]:
    """Return the lines of a program that finds the path of a text."""
    needs_features = router.needs_features
    setup = [
        'tokenizer = AutoTokenizer.from_pretrained("router/base")',
        'router = load_router(Path("router/router.safetensors").read_bytes())',
    ]
    known = ["tokens=[of_run(tokens)]" if renumbered else "tokens=[tokens]"]
    if renumbered:
        file = f'Path("router/{RUN_TOKENIZER}").read_bytes()'
        setup.append(f'of_run = JsonPieces({file}, "the tokenizer").run_tokens')
    body = [f"    tokens = tokenizer(text).input_ids[:{prefix_tokens}]"]
    if needs_features:
        setup += [
            'base = AutoModel.from_pretrained("router/base").eval()',
            "base.norm = torch.nn.Identity()  # what counts is the last block, before its norm",
        ]
        body += [
            "    with torch.no_grad():",
            "        hidden = base(torch.tensor([tokens])).last_hidden_state",
            "    features = hidden.mean(dim=1).numpy()",
        ]
        known.insert(0, "features=features")
    if router.needs_labels:
        known.append("labels=[label]")
    argument = "text, label" if router.needs_labels else "text"
    return [
        "from pathlib import Path",
        "",
        *(["import torch"] if needs_features else []),
        "from dipaco.routing.routers.kinds import Prefixes, load_router",
        *(["from dipaco.routing.tokens.tokenizer_json import JsonPieces"] if renumbered else []),
        f"from transformers import {'AutoModel, ' if needs_features else ''}AutoTokenizer",
        "",
        *setup,
        "",
        "",
        f"def path_of({argument}):",
        *body,
        f"    return int(router.route(Prefixes({', '.join(known)}))[0])",
        "",
        "",
        *([] if router.needs_labels else ["print(f\"paths/{path_of('The city lies'):05d}\")"]),
    ]


def adapter_router_readme(router: Router, prefix_tokens: int, stands_alone: bool) -> str:
    """Return how to find the adapter for a text with the files beside it."""
    head = f"# Routing: a router of kind `{router.kind}`, {router.path_count} adapters\n\n"
    if not stands_alone:
        return (
            f"{head}This kind of router does not look at what a text says. `dipaco` reads "
            "`router.safetensors` (`dipaco.routing.routers.kinds.load_router`); see "
            "docs/export.md.\n"
        )
    return (
        f"{head}A text goes to one adapter by its first {prefix_tokens} tokens; a chat goes by "
        f"what the user says first.\n\n"
        f"    python router/route.py 'How do I appeal a decision?'\n\n"
        f"prints the adapter's folder. It needs torch, transformers, safetensors and the base "
        f"model, and not dipaco. `route.json` names the base; `linear.safetensors` is the router: "
        f"the path with the greatest `weight @ features + bias`, where the features are the mean "
        f"of the base's last hidden states over these tokens, before the final norm. "
        f"`router.safetensors` is the run's own file, and `routing.json` says how many training "
        f"documents and sequences each path got.\n"
    )
