"""Random weights in the layouts in which those of KVzap and Fast KVzip are published."""

import numpy as np

from kvjax.models import ModelConfig
from kvjax.policies import Surrogate


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
