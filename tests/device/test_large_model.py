"""Layers of Llama-3.1-8B's widths in bfloat16: what the kernels for them add to the rounding that plain XLA has too."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.config import PRESETS
from kvjax.evals.perplexity import stream
from kvjax.models import init
from kvjax.pallas_kernels import op
from kvjax.pallas_kernels.device import Target
from kvjax.policies import get_policy
from kvjax.runtime import decoding
from reproduction.analyses.continuation import continuation

CONFIG = dataclasses.replace(PRESETS["llama-3.1-8b"].with_depth(2), vocab_size=512)
LAYERS = {"chelsea": 1}
"""Chelsea's programs take longest to compile, by far, and grow with layers; the kernel between two layers is in all others."""
PROMPT, LENGTH = 2000, 2100
BUDGET = 512
HEADS = {"profile": tuple(tuple("consistent" if h % 2 else "adaptive" for h in range(8)) for _ in range(2))}
POLICIES = ["chelsea", "full", "streaming_llm", "snapkv", "chunkkv", "treekv", "h2o", "catekv", "clusterkv", "quest"]


@pytest.fixture(scope="module")
def params():
    return init(CONFIG, jax.random.key(0), "bfloat16")


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH)).tolist()


def policy_of(name, config=CONFIG):
    small = {"catekv": {"budget": BUDGET, **HEADS}, "full": {}, "clusterkv": {"budget": BUDGET, "dense_layers": 0}}
    return get_policy(name, **small.get(name, {"budget": BUDGET})).bind(config)


@pytest.mark.parametrize("name", POLICIES)
def test_is_as_near_to_float32_as_xla_is(name, params, texts, monkeypatch):
    """Log-probabilities of given tokens, by the device's kernels and by XLA in bfloat16, against XLA in float32."""
    count = LAYERS.get(name, CONFIG.num_layers)
    config = CONFIG.with_depth(count)
    params = params.replace(config=config, layers=params.layers[:count])

    def scores(params) -> np.ndarray:
        for program in (decoding.prefill, stream):  # which know programs by their shapes
            program.forget()
        jax.clear_caches()
        return np.stack([row.scores.logprobs for row in continuation(params, texts, PROMPT, policy_of(name, config))])

    with jax.default_matmul_precision("default"):
        bodies = scores(params)
        monkeypatch.setattr(op, "target", lambda: Target("none", "any device, by plain XLA"))
        xla = scores(params)
    exact = scores(jax.tree.map(lambda x: x.astype("float32"), params))
    mine, theirs = (np.sqrt(np.mean((x - exact) ** 2)) for x in (bodies, xla))
    print(f"{name}: {mine:.2e} by bodies, {theirs:.2e} by XLA")
    assert mine <= 1.5 * theirs + 1e-3
