"""Random values of what policies need of a model: labels of heads, statistics of queries, and trained weights in their published layouts."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.models import ModelConfig
from kvjax.policies import FastKVzip, KVzap, MeanQueries, Policy, Surrogate, TriAttention
from kvjax.policies.profile import fingerprint


def model_inputs(cls: type[Policy], config: ModelConfig) -> dict[str, Any]:
    """Hyperparameters without which a policy cannot be bound to this model; kinds of heads take turns."""
    if kinds := getattr(cls, "labels", ()):
        heads = range(config.num_kv_heads)
        return {"profile": tuple(tuple(kinds[(i + j) % len(kinds)] for j in heads) for i in range(config.num_layers))}
    if cls is TriAttention:
        return {"profile": Cut(**vars(mean_queries(config)), dim=config.head_dim)}
    makers = {KVzap: kvzap, FastKVzip: gates}
    return {"weights": makers[cls](config)} if cls in makers else {}


@dataclasses.dataclass(frozen=True)
class Cut(MeanQueries):
    """Statistics of which a layer with smaller heads takes the first pairs: cases of one layer have other heads than `driver.TINY`.

    Attributes:
        dim: channels of the model's heads.
    """

    dim: int = dataclasses.field(kw_only=True)

    def layer(self, layer: int, head_dim: int) -> np.ndarray:
        return super().layer(layer, self.dim)[..., : head_dim // 2]


def mean_queries(config: ModelConfig) -> MeanQueries:
    """Random statistics of a model's queries, for TriAttention: means, and sizes that are no smaller."""
    random = np.random.default_rng(7)
    real, imaginary, more = random.normal(size=(3, config.num_layers, config.num_heads, config.head_dim // 2))
    found = np.stack([real, imaginary, np.hypot(real, imaginary) + np.abs(more)], axis=2)
    return MeanQueries.of(found, method="triattention", model=fingerprint(config), data="random", settings=())


def kvzap(config: ModelConfig, units: int | None = 12, seed: int = 3) -> Surrogate:
    """Networks with a layer of so many units, or linear ones."""
    width, heads = config.hidden_size, config.num_kv_heads
    shapes = {"weight": (heads, width), "bias": (heads,)}
    if units is not None:
        shapes = {"0.weight": (units, width), "0.bias": (units,), "2.weight": (heads, units), "2.bias": (heads,)}
    return _random(config, shapes, seed)


def gates(config: ModelConfig, rank: int = 6, beside: int = 5, seed: int = 4) -> Surrogate:
    """Gates with queries and keys of `rank` numbers, and so many trained keys beside a token's own."""
    heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    shapes = {
        "q_proj.weight": (heads * group * rank, config.hidden_size),
        "q_proj.bias": (heads * group * rank,),
        "k_proj.weight": (heads * rank, config.hidden_size),
        "q_norm.weight": (rank,),
        "k_norm.weight": (rank,),
        "k_base": (heads, 1, beside, rank),
        "b": (heads, 1, group),
    }
    return _random(config, shapes, seed)


def _random(config: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> Surrogate:
    random = np.random.default_rng(seed)
    return Surrogate.of(
        [
            {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            for _ in range(config.num_layers)
        ]
    )
