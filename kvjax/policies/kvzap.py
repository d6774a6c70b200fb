"""KVzap: what KVzip+ would say of a token, predicted from the token's hidden state."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open

from kvjax.config import ModelConfig

from .families.surrogates import Surrogate, SurrogateScorer, Weights
from .fields import check_fields
from .info import PolicyInfo
from .registry import register

_MOST_NUMBERS = 1 << 26
"""Of one matrix."""


@register
@dataclasses.dataclass(frozen=True)
class KVzap(SurrogateScorer):
    """Keep what a small network per layer expects KVzip+ to keep (Jégou and Jeblick 2026, by the published code in kvpress).

    From what a layer's attention reads of a token, a linear map, or one layer of D / 8 units with GELU and a linear map, predicts the logarithm of
    the token's KVzip+ score in each KV head. It was trained for one model: `nvidia/KVzap-mlp-Qwen3-8B` and likewise for Qwen3-32B and
    Llama-3.1-8B-Instruct, `linear` in place of `mlp` for the smaller network. The second reading of KVzip is not needed.

    The prompt is cut to a budget, here by default one that the heads of a layer share, and new tokens are kept. Published results are of a
    threshold for scores (KVzap in kvpress' DMSPress), by which new tokens go, too, and which leaves it to the text how much is kept;
    that is left out. Layers with a sliding window keep everything.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A prompt within it is
            kept whole.
        weights: path of a published folder, or of its `model.safetensors`; or a `Surrogate`.
        scope: whether the heads of a "layer" share their budgets, or each "head" has its own, as kvpress has it for a ratio.
        sinks: first tokens, which are kept.
        window: last tokens, which are kept, as far as the budget goes.
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="kvzap",
        paper="Jégou and Jeblick 2026, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
        summary="the prompt's tokens that a trained network expects KVzip+ to keep, the latest, and all new ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
        heads_coupled=True,
        trained=True,
    )

    source: ClassVar[str] = "nvidia/KVzap-mlp-MODEL or nvidia/KVzap-linear-MODEL"
    reads: ClassVar[tuple[str, ...]] = ("0.weight", "weight")

    window: int = 128

    def __post_init__(self) -> None:
        check_fields(self, window=0)
        super().__post_init__()

    @staticmethod
    def read(path: Path) -> Sequence[Weights]:
        arrays: dict[str, np.ndarray] = {}
        try:
            with safe_open(str(path), framework="flax") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if math.prod(shape := opened.get_slice(name).get_shape()) > _MOST_NUMBERS:
                        raise ValueError(f"no weights of KVzap: {name} has shape {shape}, more than any model's")
                    arrays[name] = np.asarray(opened.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"not a safetensors file ({error})") from None
        layers: dict[int, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            folder, number, part = (*name.split(".", 2), "", "")[:3]
            if folder != "layers" or not number.isdecimal():
                raise ValueError(
                    f"no weights of KVzap: it has {name!r}, but names should be as in layers.0.weight or layers.0.2.weight"
                )
            layers.setdefault(int(number), {})[part] = array
        if sorted(layers) != list(range(len(layers))) or not layers:
            raise ValueError(f"no weights of KVzap: it has layers {sorted(layers)}")
        return [layers[i] for i in range(len(layers))]

    def shapes(self, config: ModelConfig, found: Surrogate) -> Mapping[str, tuple[int, ...]]:
        width, heads = config.hidden_size, config.num_kv_heads
        if "0.weight" not in found.layers[0]:
            return {"weight": (heads, width), "bias": (heads,)}
        units = found.layers[0]["0.weight"].shape[0]
        return {"0.weight": (units, width), "0.bias": (units,), "2.weight": (heads, units), "2.bias": (heads,)}

    def predicted(
        self, weights: Mapping[str, Array], x: Float[Array, "B T D"], heads: Int[Array, " K"]
    ) -> Float[Array, "B K T"]:
        if "0.weight" in weights:
            x = jnp.einsum("btd,fd->btf", x, weights["0.weight"], precision="highest") + weights["0.bias"]
            x = jax.nn.gelu(x, approximate=False)
            weights = {"weight": weights["2.weight"], "bias": weights["2.bias"]}
        found = jnp.einsum("btf,kf->bkt", x, weights["weight"][heads], precision="highest")
        return found + weights["bias"][heads][:, None]

    def recent(self, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.full_like(lengths, self.window)
