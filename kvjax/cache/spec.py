"""What is static about one layer's cache, and how large one is."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.config import NO_ROPE, ModelConfig, Rope

from .shard import ONE_DEVICE, Shard


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """All that is static about one layer's cache: hashable, known before anything runs.

    `layer_specs` makes those of a model. A layer without a model needs five numbers:
    `LayerSpec(num_heads=8, num_kv_heads=2, head_dim=64, prompt_len=512, new_tokens=64)`.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K, H.
        prompt_len: T, length to which prompts are padded; 0 when decoding starts from an empty cache.
        new_tokens: maximum number of tokens to decode, padded as prompts are.
        batch: B, rows.
        layer, num_layers: which layer of how many.
        dtype: type of the cached keys and values.
        rope: the rotation that positions stand for. By default none, for keys and queries that are rotated already.
        scale: factor on attention logits. By default (0) 1 / sqrt(head_dim).
        window: sliding attention window in tokens, None where attention is full.
        block: tokens of a block, where prompts are read in blocks; 0 for whole prompts.
        kv_heads: which of the layer's KV heads these are, None for all.
        words: tokens of what a method has the model read besides the prompt, by text: those of the text, and those with which the
            model's template opens an answer. Empty where no method does, or there is no tokenizer.
        shard: how devices share the layer; of one that runs over a mesh, `batch`, `num_heads` and `num_kv_heads` are one device's.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    prompt_len: int
    new_tokens: int
    batch: int = 1
    layer: int = 0
    num_layers: int = 1
    dtype: Any = "float32"
    rope: Rope = NO_ROPE
    scale: float = 0.0
    window: int | None = None
    block: int = 0
    kv_heads: tuple[int, ...] | None = None
    words: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    shard: Shard = ONE_DEVICE

    def __post_init__(self) -> None:
        """Fill in the default scale, and make a `jnp.dtype` of the type."""
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "scale", self.scale or self.head_dim**-0.5)

    @property
    def max_tokens(self) -> int:
        """The most tokens a row can hold: padded prompt and all new ones."""
        return self.prompt_len + self.new_tokens

    def totals(self, total: Int[Array, " B"] | None) -> Int[Array, " B"]:
        """Tokens that each row will reach: as given, by default all that it can hold."""
        return jnp.full((self.batch,), self.max_tokens, jnp.int32) if total is None else total

    @property
    def head_ids(self) -> Int[Array, " K"]:
        """Numbers that tell KV heads apart, the same whatever device has them."""
        return self.shard.head_ids(self.num_kv_heads)

    def on(self, shard: Shard) -> "LayerSpec":
        """What one of these devices has of the layer."""
        batch, heads, kv_heads = (
            self.batch // shard.data,
            self.num_heads // shard.heads,
            self.num_kv_heads // shard.heads,
        )
        return dataclasses.replace(self, batch=batch, num_heads=heads, num_kv_heads=kv_heads, shard=shard)

    @property
    def whole(self) -> "LayerSpec":
        """The layer as one device has all of it."""
        shard = self.shard
        batch, heads, kv_heads = (
            self.batch * shard.data,
            self.num_heads * shard.heads,
            self.num_kv_heads * shard.heads,
        )
        return dataclasses.replace(self, batch=batch, num_heads=heads, num_kv_heads=kv_heads, shard=ONE_DEVICE)


def layer_specs(
    config: ModelConfig,
    batch: int,
    prompt_len: int,
    new_tokens: int,
    dtype: Any,
    total: int | None = None,
    block: int = 0,
) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per layer.

    Args:
        prompt_len: tokens of the longest prompt.
        new_tokens: the most that any row decodes. Both are padded up here, see `bucket`.
        total: the most tokens that any row has in all, if that is fewer than both together: the rotation is for that many.
        block: see `LayerSpec`.
    """
    rope = config.rope.resolve(prompt_len + new_tokens if total is None else total)
    return tuple(
        LayerSpec(
            layer=layer,
            num_layers=config.num_layers,
            batch=batch,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            prompt_len=bucket(prompt_len),
            new_tokens=bucket(new_tokens, LEAST_NEW_TOKENS),
            dtype=jnp.dtype(dtype),
            rope=rope,
            scale=config.head_dim**-0.5,
            window=window,
            block=block,
        )
        for layer, window in enumerate(config.windows)
    )


LEAST_NEW_TOKENS = 8
"""The smallest room for new tokens."""


def bucket(length: int, least: int = 64) -> int:
    """What a length is padded to: 2^n or 1.5 × 2^n, at least `least`, a power of two; so a few compiled programs serve all lengths."""
    if length == 0:
        return 0
    size = least
    while size < length:
        size *= 2
    return size * 3 // 4 if size > least and length <= size * 3 // 4 else size


def row_buckets(lengths: Int[Array, " B"], longest: int) -> Int[Array, " B"]:
    """`bucket` of each length, none of which is above `longest`."""
    sizes = [bucket(1)]
    while sizes[-1] < longest:
        sizes.append(bucket(sizes[-1] + 1))
    return jnp.asarray(sizes, jnp.int32)[jnp.searchsorted(jnp.asarray(sizes, jnp.int32), lengths)]


def round_slots(slots: int) -> int:
    """Capacity for at least `slots` slots: a multiple of 128, or of 32 in caches under 2048.

    Odd capacities are slow (13107 slots took 12.5 ms per step on an H200 where 13056 took 8.1); in a small cache a step of 128
    would hold up to half as many slots again as were asked for.
    """
    step = 128 if slots > 2048 else 32
    return -(-slots // step) * step
