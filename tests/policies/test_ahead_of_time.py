"""Every policy's decode step at the shape of Llama 3.1 8B and 32k tokens, compiled by the TPU's own compiler.

With `KVJAX_TPU_STEPS=FILE`, the tests that pass add a row to FILE. The site's support matrix reads
`benchmarks/results/tpu-steps.json`, which is written by

    export KVJAX_TPU_STEPS=benchmarks/results/tpu-steps.json KVJAX_LONG_SHARE=all
    python -m pytest -m "slow or long" tests/policies/test_ahead_of_time.py
"""

import dataclasses
import os
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from filelock import FileLock
from kernels.ahead_of_time import compile_for, temporaries
from policies.facts import facts_of
from policies.surrogates import model_inputs

from benchmarks import report
from kvjax.cache import layer_specs
from kvjax.config import PRESETS
from kvjax.models import ModelConfig, abstract
from kvjax.policies import Policy, get_policy, policies
from kvjax.runtime import decoding

LAYERS = {"chelsea": 8}
"""Layers, where not three: enough for policies that treat the first two differently, and more than may be copied."""

WORKSPACE = {"chelsea": 5, "rkv": 2, "triattention": 2, "vase": 2}
"""Layers' caches that a step may need room for, where not one: Chelsea cuts a layer's keys into chunks, and merges into room beside; R-KV
has 16 MiB of keys' cosines with one another at a time, TriAttention keys in float32, and VaSE the attention of 64 queries to all keys."""

NAMES = list(policies(trained=False))
"""Of methods that need trained weights, a step is another method's."""

CONFIG = PRESETS["llama-3.1-8b"]


def policy_for(name: str, config: ModelConfig) -> Policy:
    """The policy at a fifth of the context (sparse ones: 1024 tokens per step), with what it needs of the model."""
    cls = policies()[name]
    options = model_inputs(cls, config)
    if "budget" in {field.name for field in dataclasses.fields(cls)}:
        options["budget"] = 1024 if cls.about.memory == "sparse" else 0.2
    return get_policy(name, **options).bind(config)


def tier(name: str) -> pytest.MarkDecorator:
    """Policies that are built from the same parts as others, and need no more room, are among the long tests."""
    return pytest.mark.slow if facts_of(name).tier == "default" or name in WORKSPACE else pytest.mark.long


@pytest.mark.optimised
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "generation"),
    [
        *(pytest.param(name, "v5e", marks=tier(name)) for name in NAMES),
        pytest.param("treekv", "v6e", marks=pytest.mark.slow),
        pytest.param("quest", "v6e", marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_copies_no_cache(name, generation):
    """What a step needs besides weights and cache is less than one layer's cache, so no layer's is copied."""
    config = CONFIG.with_depth(LAYERS.get(name, 3))
    policy = policy_for(name, config)
    specs = layer_specs(config, 1, 32768 - 256, 256, jnp.bfloat16)
    caches = tuple(jax.eval_shape(policy.layer(spec).init) for spec in specs)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = compile_for(
        generation,
        partial(decoding.step, policy, specs),
        abstract(config, jnp.bfloat16),
        caches,
        token,
        token,
        donate_argnums=1,
    )
    layers = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) for cache in caches]
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.95 * sum(layers)
    assert temporaries(compiled) < WORKSPACE.get(name, 1) * max(layers)
    _keep(
        {
            "policy": name,
            "generation": generation,
            "layers": config.num_layers,
            "cache_bytes": sum(layers),
            "temporary_bytes": temporaries(compiled),
        }
    )


def test_the_support_matrix_knows_all_policies():
    found = report.read(Path(report.__file__).parent / "results/tpu-steps.json")["rows"]
    assert {row["policy"] for row in found if row["generation"] == "v5e"} == set(NAMES)


def _keep(row: dict[str, Any]) -> None:
    """Put a row into the file of `KVJAX_TPU_STEPS`, if it is set, over an earlier one of the same policy and chip."""
    if not (file := os.environ.get("KVJAX_TPU_STEPS")):
        return
    with FileLock(f"{file}.lock"):
        settings = {"shape": "llama-3.1-8b", "context": 32768, "dtype": "bfloat16", "libtpu": version("libtpu")}
        header, rows = report.begun(Path(file), report.header(**settings))
        same = "policy", "generation"
        others = [old for old in rows if any(old[key] != row[key] for key in same)]
        report.write(Path(file), header, sorted([*others, row], key=lambda each: [each[key] for key in same]))
