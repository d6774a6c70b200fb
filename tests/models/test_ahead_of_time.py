"""Models with window rings, experts, attention sinks and gated delta nets, compiled by the TPU's own compiler at the width of real models."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from kernels.ahead_of_time import chip

from kvjax.config import PRESETS, AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, RopeConfig
from kvjax.models import abstract
from kvjax.models.sharding import bytes_per_device
from kvjax.planning.workspace import cache_bytes, workspace
from kvjax.runtime import absent_tpu, rows
from kvjax.runtime.batch import Batch
from kvjax.runtime.disk_cache import not_kept
from kvjax.runtime.engine import Engine

PROMPT, NEW, ROWS = 8192, 256, 8


def windows_and_full() -> ModelConfig:
    """A layer with a window and one without, as in Gemma 3 27B. The vocabulary is smaller, as two layers are few beside it."""
    local = AttentionConfig(32, 16, 128, RopeConfig(1e4, 128), window=1024, scale=168**-0.5, qk_norm=True)
    full = dataclasses.replace(local, rope=RopeConfig(1e6, 128), window=None)
    layers = tuple(LayerConfig(mixer, MLPConfig(21504, activation="gelu_tanh"), "both") for mixer in (local, full))
    return ModelConfig("gemma3_text", 65536, 5376, layers, 131072, norm_offset=1.0, tied=True, embed_scale=73.5)


def shallow(name: str, layers: int) -> ModelConfig:
    """The first layers of a real model, which are a whole period of its pattern, with a smaller vocabulary."""
    return dataclasses.replace(PRESETS[name].with_depth(layers), vocab_size=65536)


def sigmoid_router() -> ModelConfig:
    """A dense layer and one with experts, as in GLM-4.5-Air."""
    attention = AttentionConfig(96, 8, 128, RopeConfig(1e6, 64), qkv_bias=True)
    experts = MoEConfig(128, 8, 1408, shared=1408, router="sigmoid")
    layers = tuple(LayerConfig(attention, mlp) for mlp in (MLPConfig(10944), experts))
    return ModelConfig("glm4_moe", 65536, 4096, layers, 131072)


class Model(NamedTuple):
    """A model as it is compiled, the kind of its weights, and how many layers the real model has."""

    config: ModelConfig
    depth: int
    weights: str = "float"


MODELS = {
    "windows": Model(windows_and_full(), 62),
    "experts": Model(PRESETS["qwen3-30b-a3b"].with_depth(2), 48),
    "hybrid": Model(shallow("qwen3.5-9b", 4), 32),
    "sinks": Model(shallow("gpt-oss-20b", 2), 24),
    "sinks-mxfp4": Model(shallow("gpt-oss-20b", 2), 24, "mxfp4"),
    "sigmoid-router": Model(sigmoid_router(), 46),
}

BLOCKS = {"v5e": None, "v5e:2x2": 2048, "v6e": 2048, "v6e:2x2": None}
"""Sizes of blocks of prompts, by chips. None reads whole prompts."""

CASES = [
    (model, chips, block)
    for model in MODELS
    for chips in BLOCKS
    for block in ((None, 2048) if model in ("windows", "experts") else (BLOCKS[chips],))
]
"""Models, chips, and sizes of blocks."""

PROGRAMS = rows.serve, rows.insert, rows.admit
"""Programs that write into a batch's memory. The last one is for whole prompts."""

CHEAPEST = ("windows", "v5e", None)

TOO_HIGH = ("windows", "v6e", None)
"""The prediction is that of v5e, where the program needs more. At the peak, both keep the MLP's gate and up projections. Beside
these, XLA keeps five arrays of the size of the residual stream for v5e, and one for v6e.
"""


@pytest.mark.optimised
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("model", "chips", "block"),
    [pytest.param(*case, marks=pytest.mark.slow if case == CHEAPEST else pytest.mark.long) for case in CASES],
)
def test_programs_need_the_predicted_memory(model: str, chips: str, block: int | None) -> None:
    """Prefill, insertion into a running batch, and decoding. The last two write into the batch's memory.

    On one chip the prediction is within 10 % for the layers of one period. On several chips it is for the whole model, whose
    other layers add their weights and caches. The estimate of temporary memory is higher than the compiler's there.
    """
    chip(chips)
    config, depth, weights = MODELS[model]
    params, deep = (
        abstract(c, jnp.bfloat16, weights=weights) for c in (config, config.with_depth(2 * config.num_layers))
    )
    for program in PROGRAMS:
        program.forget()  # a model with equal caches may have been compiled before, whose insertion is the same
    sizes = {"prompt_len": PROMPT, "max_new_tokens": NEW, "block": block, "mesh": absent_tpu.mesh(chips)}
    batch = Batch(params, "snapkv:1024", rows=ROWS, **sizes)
    assert batch.engine.shard.mesh is not None
    with jax.sharding.use_abstract_mesh(batch.engine.shard.mesh.abstract_mesh), not_kept():
        peak = batch.compile([PROMPT])
    held = batch.row_bytes * ROWS
    for program in PROGRAMS[: 2 if block else 3]:
        (executable,) = program.executables
        assert executable.memory_analysis().alias_size_in_bytes >= held
    one, deeper = (Engine(each, "snapkv:1024", batch=1, **sizes) for each in (params, deep))
    own, more = (bytes_per_device(engine.weights) for engine in (one, deeper))
    others = 0 if batch.engine.shard.devices == 1 else (depth // config.num_layers - 1) * (more - own + held)
    predicted = own + held + cache_bytes(one)[0] + max(workspace(one, tpu=True))
    assert peak <= 1.1 * predicted
    close = predicted + others == pytest.approx(peak + others, rel=0.1)
    if (model, chips, block) == TOO_HIGH:
        assert not close, "the prediction holds; remove TOO_HIGH"
        pytest.xfail(f"predicted {predicted / 1e9:.2f} GB for a program that needs {peak / 1e9:.2f} GB")
    assert close, (predicted, peak, others)
