"""KVzap: KVzip+ scores of tokens, predicted from their hidden states."""

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
"""Maximum size of one matrix."""


@register
@dataclasses.dataclass(frozen=True)
class KVzap(SurrogateScorer):
    """Keep what a small network per layer expects KVzip+ to keep (Jégou and Jeblick 2026, by the code in kvpress).

    The network predicts the logarithm of a token's KVzip+ score in each KV head from the attention inputs. It is a
    linear map, or an MLP with D / 8 units and GELU. Networks are trained for one model: `nvidia/KVzap-mlp-Qwen3-8B`,
    and likewise for Qwen3-32B and Llama-3.1-8B-Instruct. `linear` in place of `mlp` is the smaller network. The second
    pass of KVzip is not needed.

    The prompt is cut to a budget, which the heads of a layer share by default. New tokens are kept. Published results
    use a threshold for scores instead (KVzap in kvpress' DMSPress), as `thresholded` does. It also evicts new tokens,
    and the text determines how much is kept. Layers with a sliding window keep everything.

    Attributes:
        budget: slots for the prompt in the average head: a number of tokens, or a fraction of prompt + new tokens. A
            prompt within it is kept whole.
        weights: path of a published folder, or of its `model.safetensors`, or a `Surrogate`.
        scope: whether the heads of a "layer" share their budgets, or each "head" has its own, as in kvpress for a
            ratio.
        sinks: first tokens, always kept.
        window: last tokens, kept as far as the budget allows.

    Example:
        >>> policy = kvjax.KVzap(budget=64, weights="KVzap-mlp-Qwen3-8B", window=16)  # a published folder
        >>> str(policy)
        'kvzap:budget=64,weights=KVzap-mlp-Qwen3-8B,window=16'
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
                        raise ValueError(f"not weights of KVzap: {name} has shape {shape}, larger than any model's")
                    arrays[name] = np.asarray(opened.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"not a safetensors file ({error})") from None
        layers: dict[int, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            folder, number, part = (*name.split(".", 2), "", "")[:3]
            if folder != "layers" or not number.isdecimal():
                raise ValueError(
                    f"not weights of KVzap: the name {name!r} does not have the form layers.0.weight or layers.0.2.weight"
                )
            layers.setdefault(int(number), {})[part] = array
        if sorted(layers) != list(range(len(layers))) or not layers:
            raise ValueError(f"not weights of KVzap: layers are {sorted(layers)}, not 0, 1, 2, ...")
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
