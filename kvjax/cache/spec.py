"""Static facts of one layer's cache, and the sizes of caches."""

import bisect
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.config import NO_ROPE, AttentionConfig, DeltaNetConfig, ModelConfig, Rope

from .shard import ONE_DEVICE, Shard


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """All static facts of one layer's cache: hashable, known before anything runs.

    `layer_specs` makes those of a model. A layer without a model needs five numbers: `LayerSpec(num_heads=8,
    num_kv_heads=2, head_dim=64, prompt_len=512, new_tokens=64)`.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K, H.
        prompt_len: T, length that prompts are padded to, 0 if decoding starts from an empty cache.
        new_tokens: maximum number of tokens to decode, padded as prompts are.
        batch: B, rows.
        layer, num_layers: index of the layer, and number of layers.
        dtype: dtype of cached keys and values.
        rope: the rotation by positions. Defaults to none, for keys and queries that are already rotated.
        scale: factor on attention logits. Defaults (0) to 1 / sqrt(head_dim).
        window: sliding attention window in tokens, None for full attention.
        block: block size in tokens for chunked prefill, 0 for whole prompts.
        mixed: whether a batch of one row, too, may hold prompts of any length up to `prompt_len`. Larger batches always may.
        recurrent: the recurrent mixer of a layer without a cache; None for attention. `num_heads` are then its value heads,
            `num_kv_heads` its key heads, and `head_dim` the channels of a value.
        kv_heads: which of the layer's KV heads these are, None for all.
        words: tokens of the words that replays read besides the prompt, by text: those of the text, and those that open
            an answer in the model's template. Empty without replays or without a tokenizer.
        template: tokens that the model's chat template puts before a user's text. Empty unless replays skip them.
        shard: how devices shard the layer. On a mesh, `batch`, `num_heads` and `num_kv_heads` are those of one device.

    Example:
        >>> spec = kvjax.cache.LayerSpec(num_heads=8, num_kv_heads=2, head_dim=64, prompt_len=512, new_tokens=64)
        >>> kvjax.SnapKV(budget=128).layer(spec).capacity  # slots: the budget, and all new tokens
        192
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
    mixed: bool = False
    recurrent: DeltaNetConfig | None = None
    kv_heads: tuple[int, ...] | None = None
    words: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    template: tuple[int, ...] = ()
    shard: Shard = ONE_DEVICE

    def __post_init__(self) -> None:
        """Fill in the default scale, and convert the dtype to a `jnp.dtype`."""
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "scale", self.scale or self.head_dim**-0.5)

    def __hash__(self) -> int:
        """Hash of the fields, computed once, because specs are part of the key of every program and of many cached sizes."""
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """The fields. Hashes differ between processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a row: padded prompt and all new tokens."""
        return self.prompt_len + self.new_tokens

    @property
    def shortest_prompt(self) -> int:
        """Minimum tokens of a row's prompt.

        A batch of one is padded to the next bucket, unless it is `mixed`. Other batches may hold rows of any length, and
        in chunked prefill a prompt was shorter before.
        """
        known = self.batch * self.shard.data == 1 and not self.mixed and not self.block
        return bisect.bisect_left(range(self.prompt_len), self.prompt_len, key=bucket) if known else 1

    def totals(self, total: Int[Array, " B"] | None) -> Int[Array, " B"]:
        """Tokens that each row will reach: as given, or the maximum by default."""
        return jnp.full((self.batch,), self.max_tokens, jnp.int32) if total is None else total

    @property
    def head_ids(self) -> Int[Array, " K"]:
        """IDs of the KV heads, independent of how they are sharded."""
        return self.shard.head_ids(self.num_kv_heads)

    def on(self, shard: Shard) -> "LayerSpec":
        """Return the spec of one device's part of the layer."""
        batch, heads, kv_heads = (
            self.batch // shard.data,
            self.num_heads // shard.heads,
            self.num_kv_heads // shard.heads,
        )
        return dataclasses.replace(self, batch=batch, num_heads=heads, num_kv_heads=kv_heads, shard=shard)

    @property
    def whole(self) -> "LayerSpec":
        """The spec of the whole layer on one device."""
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
        config: the model.
        batch: number of rows.
        prompt_len: tokens of the longest prompt.
        new_tokens: maximum number of tokens that a row decodes. This and `prompt_len` are padded here, see `bucket`.
        dtype: dtype of keys and values.
        total: maximum tokens of a row, if less than prompt_len + new_tokens. The rotation is resolved for this length.
        block: see `LayerSpec`.

    Example:
        >>> specs = kvjax.cache.layer_specs(params.config, batch=2, prompt_len=48, new_tokens=16, dtype="float32")
        >>> len(specs), specs[0].prompt_len, specs[0].num_kv_heads  # one per layer; lengths are padded
        (2, 64, 2)
    """
    ropes = config.resolve_ropes(prompt_len + new_tokens if total is None else total)
    padded = bucket(prompt_len), bucket(new_tokens, LEAST_NEW_TOKENS)
    return _padded_specs(config, batch, *padded, jnp.dtype(dtype), ropes, block)


@functools.lru_cache(maxsize=256)
def _padded_specs(
    config: ModelConfig, batch: int, prompt_len: int, new_tokens: int, dtype: Any, ropes: tuple[Rope, ...], block: int
) -> tuple[LayerSpec, ...]:
    """`layer_specs` of padded sizes. Equal sizes give the same objects, which compare at once."""
    rope_of = dict(zip(config.kinds, ropes, strict=True))
    return tuple(
        LayerSpec(
            layer=i,
            num_layers=config.num_layers,
            batch=batch,
            prompt_len=prompt_len,
            new_tokens=new_tokens,
            dtype=dtype,
            rope=rope_of[layer],
            block=block,
            **_of_mixer(layer.mixer),
        )
        for i, layer in enumerate(config.layers)
    )


def _of_mixer(mixer: AttentionConfig | DeltaNetConfig) -> dict[str, Any]:
    """What a `LayerSpec` contains of a mixer, by field."""
    if isinstance(mixer, DeltaNetConfig):
        heads, head_dim = (mixer.value_heads, mixer.key_heads), mixer.value_dim
        return {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "recurrent": mixer}
    return {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "scale": mixer.logit_scale,
        "window": mixer.window,
    }


LEAST_NEW_TOKENS = 8
"""Minimum of the padded number of new tokens."""


def bucket(length: int, least: int = 64) -> int:
    """Pad a length to 2^n or 1.5 × 2^n, at least `least`, so that few compiled programs serve all lengths.

    `least` is a power of two.

    Example:
        >>> [kvjax.cache.bucket(length) for length in (10, 65, 100, 1000)]
        [64, 96, 128, 1024]
    """
    if length == 0:
        return 0
    size = least
    while size < length:
        size *= 2
    return size * 3 // 4 if size > least and length <= size * 3 // 4 else size


def row_buckets(lengths: Int[Array, " B"], longest: int) -> Int[Array, " B"]:
    """`bucket` of each length. No length exceeds `longest`.

    Example:
        >>> kvjax.cache.row_buckets(jnp.asarray([10, 65, 100]), longest=128).tolist()
        [64, 96, 128]
    """
    sizes = [bucket(1)]
    while sizes[-1] < longest:
        sizes.append(bucket(sizes[-1] + 1))
    return jnp.asarray(sizes, jnp.int32)[jnp.searchsorted(jnp.asarray(sizes, jnp.int32), lengths)]


def round_slots(slots: int) -> int:
    """Capacity for at least `slots` slots: a multiple of 128, or of 32 up to 2048 slots.

    Odd capacities are slow. (13107 slots took 12.5 ms per step on an H200, 13056 took 8.1 ms.) In a small cache, steps
    of 128 could add half as many slots as were requested.

    Example:
        >>> kvjax.cache.round_slots(33), kvjax.cache.round_slots(13107)
        (64, 13184)
    """
    step = 128 if slots > 2048 else 32
    return -(-slots // step) * step
