"""KVgrad, literally: scores of a part in NumPy loops, and gradients of a transformers model by torch."""

from typing import Any

import numpy as np
from policies.facts import Facts
from policies.oracle_kvzip import FACTS as KVZIP
from policies.oracle_kvzip import part_scores

FACTS = {
    "kvgrad": Facts(
        published={name: x for name, x in KVZIP["kvzip"].published.items() if name != "plus"} | {"chunk": 512},
        least=KVZIP["kvzip"].least,
        budgets=KVZIP["kvzip"].budgets,
        small={"chunk": 8},
        golden=KVZIP["kvzip"].golden | {"scope": "layer", "prefix": 0},  # so that both of KVzip's ways are recorded
        tier="long",
        whole_prompts=True,
    ),
}


def scores(
    queries: np.ndarray,
    sinks: np.ndarray,
    part: np.ndarray,
    own: np.ndarray,
    values: np.ndarray,
    gradients: np.ndarray,
    asking: range | None = None,
) -> np.ndarray:
    """The most of A * |v W_O| * |grad| that any query gives to each key of a part, see `oracle_kvzip.part_scores`.

    Args:
        queries, sinks, part, own, asking: likewise.
        values: [G, c], norm of each value behind the output projection of each query head.
        gradients: [R], norm of the gradient at each query.
    """
    return part_scores(queries, sinks, part, own, asking, values, 1 / np.maximum(gradients, 1e-30))


def gradient_norms(model: Any, prompt: list[int], read: list[int]) -> np.ndarray:
    """|grad of sum |h|^2 by what each layer's attention puts out| at each token read after a prompt, [L, R].

    As `KVgradPress._score_chunk` of kvpress 0.5.5: h is put out by the last layer, before the final norm. The prompt's keys and values are
    constant.
    """
    import torch

    outputs, last, hooks = [], [], []

    def attended(module: Any, args: Any, output: Any) -> None:
        output[0].retain_grad()
        outputs.append(output[0])

    with torch.no_grad():
        cache = model.model(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer in model.model.layers:
        hooks.append(layer.self_attn.register_forward_hook(attended))
    hooks.append(
        model.model.layers[-1].register_forward_hook(
            lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
        )
    )
    try:
        embedded = model.model.embed_tokens(torch.tensor([read])).detach().requires_grad_(True)
        model.model(inputs_embeds=embedded, past_key_values=cache)
        last[0].float().square().sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack([out.grad[0].float().norm(dim=-1).numpy() for out in outputs])
