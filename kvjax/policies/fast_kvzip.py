"""Fast KVzip: trained gates that predict what KVzip would keep."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax._util import torch_files
from kvjax.config import ModelConfig

from .budget import budget_rows
from .families.surrogates import Surrogate, SurrogateScorer, Weights
from .fields import check_fields
from .info import PolicyError, PolicyInfo
from .registry import register

EPSILON = 1e-6
"""Epsilon of the gate's RMS norms."""


@register
@dataclasses.dataclass(frozen=True)
class FastKVzip(SurrogateScorer):
    """Keep what a trained gate per layer expects KVzip to keep (Kim et al. 2026, by the published code).

    A gate maps the attention inputs of a token to a small query per query head and a small key per KV head, both
    normed. The score is the softmax probability that the query gives to the token's own key beside some trained keys.
    It is the mean over the query group: mean_g 1 / (1 + Σ_s exp(κ_s · q_g / √r - k · q_g / √r - b_g)).

    Gates are trained for one model. `Jang-Hyun/Fast-KVzip` has a `.pt` file per model, such as
    `qwen3-8b/q4_dim16_sink16.pt`. It is parsed without executing anything in it.

    The prompt is cut once. The heads of a layer share a budget, as in `layerwise` of the published code and kvpress.
    Their default is one budget for all layers. First and last tokens are kept within the budget. The published code
    also cuts the prompt chunk by chunk during prefill, and evicts while decoding. Neither is implemented here. Layers
    with a sliding window keep everything.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A
            prompt within it is kept whole.
        weights: path of a published `.pt` file, or a `Surrogate`.
        scope: whether the heads of a "layer" share their budgets, or each "head" has its own.
        sinks: first tokens, always kept.
        window: last tokens that are kept of prompts of `long` tokens or more, as far as the budget allows.
        short_window: share of the last tokens that is kept of shorter prompts.
        long: minimum tokens of a long prompt. 32000 in kvpress.

    Example:
        >>> policy = kvjax.FastKVzip(budget=64, weights="q4_dim16_sink16.pt", window=16)  # a published file
        >>> str(policy)
        'fast_kvzip:budget=64,weights=q4_dim16_sink16.pt,window=16'
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="fast_kvzip",
        paper="Kim et al. 2026, Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction",
        summary="the prompt's tokens that a trained gate expects KVzip to keep, its two ends, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
        heads_coupled=True,
        trained=True,
    )

    source: ClassVar[str] = "Jang-Hyun/Fast-KVzip"
    reads: ClassVar[tuple[str, ...]] = ("q_proj.weight",)

    sinks: int = 4
    window: int = 4096
    short_window: float = 0.02
    long: int = 16000

    def __post_init__(self) -> None:
        check_fields(self, window=0, short_window=0, long=0)
        if self.short_window > 1:
            raise PolicyError(
                f"{self.info.name}: short_window={self.short_window} is out of range. Give a share from 0 to 1."
            )
        super().__post_init__()

    @staticmethod
    def read(path: Path) -> Sequence[Weights]:
        found = torch_files.read(path)
        layers = found.get("module") if isinstance(found, dict) else None
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
            raise ValueError("not gates of Fast KVzip: 'module' is not a list of dictionaries")
        for layer in layers:
            if not all(isinstance(array, np.ndarray) for array in layer.values()):
                raise ValueError("not gates of Fast KVzip: a gate has values that are not arrays")
        return [dict(layer) for layer in layers]

    def shapes(self, config: ModelConfig, found: Surrogate) -> Mapping[str, tuple[int, ...]]:
        width, heads, group = config.hidden_size, config.num_kv_heads, config.num_heads // config.num_kv_heads
        first = found.layers[0]
        rank = first["q_norm.weight"].shape[-1] if "q_norm.weight" in first else 16
        beside = first["k_base"].shape[2] if "k_base" in first and first["k_base"].ndim == 4 else 16
        return {
            "q_proj.weight": (heads * group * rank, width),
            "q_proj.bias": (heads * group * rank,),
            "k_proj.weight": (heads * rank, width),
            "q_norm.weight": (rank,),
            "k_norm.weight": (rank,),
            "k_base": (heads, 1, beside, rank),
            "b": (heads, 1, group),
        }

    def predicted(
        self, weights: Mapping[str, Array], x: Float[Array, "B T D"], heads: Int[Array, " K"]
    ) -> Float[Array, "B K T"]:
        rank, count = weights["q_norm.weight"].shape[0], weights["k_base"].shape[0]
        q_matrix = einops.rearrange(weights["q_proj.weight"], "(k g r) d -> k g r d", k=count, r=rank)[heads]
        q_bias = einops.rearrange(weights["q_proj.bias"], "(k g r) -> k g r", k=count, r=rank)[heads]
        k_matrix = einops.rearrange(weights["k_proj.weight"], "(k r) d -> k r d", k=count)[heads]
        q = jnp.einsum("btd,kgrd->btkgr", x, q_matrix, precision="highest") + q_bias
        q = _normed(q, weights["q_norm.weight"]) / math.sqrt(rank)
        k = _normed(jnp.einsum("btd,krd->btkr", x, k_matrix, precision="highest"), weights["k_norm.weight"])
        logit = jnp.einsum("btkgr,btkr->btkg", q, k, precision="highest") + weights["b"][heads, 0]
        beside = jnp.einsum("btkgr,ksr->btkgs", q, weights["k_base"][heads, 0], precision="highest")
        rivals = jax.nn.logsumexp(beside, axis=-1)
        return einops.rearrange(jnp.mean(jax.nn.sigmoid(logit - rivals), axis=-1), "b t k -> b k t")

    def recent(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        short = budget_rows(float(self.short_window), lengths) if self.short_window else jnp.zeros_like(lengths)
        return jnp.where(lengths >= self.long, self.window, short)


def _normed(x: Float[Array, "... r"], weight: Float[Array, " r"]) -> Float[Array, "... r"]:
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
