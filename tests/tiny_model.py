"""The model of most tests, and of the pages' doctests: small, with random weights, so that no file is needed."""

import functools

import jax

from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, Params, init


@functools.cache
def tiny() -> Params:
    """A random Llama in float32: 2 layers, 4 query heads on 2 KV heads of 16, vocabulary 64, window 256, no tokenizer."""
    config = ModelConfig.uniform(
        family="llama",
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=256,
        rope=RopeConfig(theta=10000.0, dim=16),
    )
    return init(config, jax.random.key(0))
