"""Triton kernel of `sharded_decode_attention`: attention of one query per head over several caches, in one grid.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `decode_attention` over
each cache, up to rounding, which is what `api.py` computes otherwise.

Every program does the work of a program of `decode_attention`. It derives its cache, head and part from its index.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..head_shards import head_at, is_among, place_among
from ..rotary import DeferredRope, parts_of
from ..triton import triton_call
from . import decode_attention_pallas_triton as unsharded
from .types import CacheShard

PROGRAMS = 512
"""Maximum number of programs, so that all run on the device at once."""


@dataclasses.dataclass(frozen=True)
class ShardPrograms:
    """The programs of one cache: one per sequence, head and part of its slots.

    Attributes:
        heads: KV heads of the layer that are in this cache.
        rows, layer_heads: sequences and KV heads of the layer.
        slots: capacity of the cache.
        parts: parts per head.
        begin: index of the first program.
    """

    heads: tuple[int, ...]
    rows: int
    layer_heads: int
    slots: int
    parts: int
    begin: int

    @property
    def end(self) -> int:
        """The index after the last program."""
        return self.begin + self.rows * len(self.heads) * self.parts

    def here(self, program: Any) -> tuple[Any, Any]:
        """Return a program's index of (sequence, head) in the cache, and its part. They are clipped for other caches'
        programs.
        """
        number = jax.lax.clamp(0, program - self.begin, self.end - self.begin - 1)
        return number // self.parts, number % self.parts

    def row(self, program: Any) -> Any:
        """Return a program's sequence."""
        return self.here(program)[0] // len(self.heads)

    def layer_index(self, program: Any) -> Any:
        """Return a program's index of (sequence, head) in the layer."""
        place = self.here(program)[0] % len(self.heads)
        return self.row(program) * self.layer_heads + head_at(place, self.heads)

    def of_layer(self, number: Any) -> Any:
        """Return the cache's index of (sequence, head), given that of the layer. It is clipped if the cache does not
        have the head.
        """
        row, head = number // self.layer_heads, number % self.layer_heads
        return jax.lax.min(row * len(self.heads) + place_among(head, self.heads), self.rows * len(self.heads) - 1)


def unsupported_reason(q: Array | DeferredRope, caches: Sequence[CacheShard], **_: Any) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    for cache in caches:
        if reason := unsharded.unsupported(cache.k, None):
            return reason
    return None


def sharded_decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[CacheShard],
    *,
    scale: float,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B N H"]:
    """Attend with each head over its cache; see the public function.

    Args:
        sizes: `block` (slots read at a time), `part` (blocks per program), `warps` and `stages`, instead of the default
            sizes.
    """
    # Longest cache first: programs that do not fit on the device at once then have short parts.
    caches = sorted(caches, key=lambda cache: -cache.k.shape[2])
    arrays = [(cache.k, cache.v, cache.weight) for cache in caches]
    sizes = sizes or _sizes([cache.k for cache in caches])
    heads = tuple(tuple(cache.heads) for cache in caches)
    return _attend(q, arrays, heads=heads, scale=scale, interpret=interpret, **sizes)


def _sizes(keys: Sequence[Array]) -> dict[str, int]:
    """Return sizes for about `PROGRAMS` programs at most. A part of one block is split into two halves."""
    dim, dtype = keys[0].shape[-1], keys[0].dtype
    block = unsharded.block_size(min(k.shape[2] for k in keys), dim, dtype)
    blocks = sum(k.shape[0] * k.shape[1] * -(-k.shape[2] // block) for k in keys)
    part = -(-blocks // PROGRAMS)
    if part == 1 and block > 16:
        block, part = block // 2, 2
    return {"block": block, "part": part, "warps": 4, "stages": 2 if block > 64 else 3}


@functools.partial(jax.jit, static_argnames=("heads", "scale", "interpret", "block", "part", "warps", "stages"))
def _attend(
    q: Float[Array, "B N H"] | DeferredRope,
    caches: Sequence[tuple[Array, Array, Array]],
    *,
    heads: tuple[tuple[int, ...], ...],
    scale: float,
    interpret: bool,
    block: int,
    part: int,
    warps: int,
    stages: int,
) -> Float[Array, "B N H"]:
    """Call the kernels. They are traced and lowered once for all layers of one shape."""
    unrotated, *tables = parts_of(q)
    batch, count, dim = unrotated.shape
    kv_heads = sum(map(len, heads))
    group, part = count // kv_heads, part * block
    queries = unrotated.reshape(batch * kv_heads, group, dim)

    shards, inputs, specs, shapes, out_specs, joined, end = [], [], [], [], [], [], 0
    for (k, v, weight), mine in zip(caches, heads, strict=True):
        slots = k.shape[2]
        shard = ShardPrograms(mine, batch, kv_heads, slots, -(-slots // part), end)
        end = shard.end
        shards.append(shard)
        inputs += [queries, *(x.reshape(-1, *x.shape[2:]) for x in (k, v, weight)), *tables]
        specs += [
            pl.BlockSpec((None, group, dim), lambda p, shard=shard: (shard.layer_index(p), 0, 0)),
            *(pl.BlockSpec((None, slots, dim), lambda p, shard=shard: (shard.here(p)[0], 0, 0)) for _ in "kv"),
            pl.BlockSpec((None, slots), lambda p, shard=shard: (shard.here(p)[0], 0)),
            *(pl.BlockSpec((1, dim // 2), lambda p, shard=shard: (shard.row(p), 0)) for _ in tables),
        ]
        for rest in ((dim,), (), ()):  # values, largest logit, sum of exponentials
            nothing = (0,) * len(rest)
            shapes.append(jax.ShapeDtypeStruct((batch * len(mine), shard.parts, group, *rest), jnp.float32))
            of_part = pl.BlockSpec(
                (None, None, group, *rest), lambda p, shard=shard, nothing=nothing: (*shard.here(p), 0, *nothing)
            )
            of_head = pl.BlockSpec(
                (None, shard.parts, None, *rest),
                lambda p, g, shard=shard, nothing=nothing: (shard.of_layer(p), 0, g, *nothing),
            )
            out_specs.append(of_part)
            joined.append(of_head)
    each = 4 + len(tables)

    def body(*refs: Any) -> None:
        program, outs = pl.program_id(0), refs[each * len(shards) :]
        for i, shard in enumerate(shards):
            attend_part = functools.partial(
                unsharded.attend_part,
                *refs[each * i : each * (i + 1)],
                *outs[3 * i : 3 * (i + 1)],
                number=shard.here(program)[1],
                scale=scale,
                block=block,
                part=part,
                slots=shard.slots,
                rotated="queries" if tables else "nothing",
            )
            pl.when((program >= shard.begin) & (program < shard.end))(attend_part)

    def join(*refs: Any) -> None:
        head = pl.program_id(0) % kv_heads
        for i, shard in enumerate(shards):
            join_parts = functools.partial(unsharded.join_parts, *refs[3 * i : 3 * (i + 1)], *refs[-2:])
            pl.when(is_among(head, shard.heads))(join_parts)

    results = triton_call(
        body,
        grid=(end,),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=shapes,
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="sharded_decode_attention",
    )(*inputs)
    out, _ = triton_call(
        join,
        grid=(batch * kv_heads, group),
        in_specs=joined,
        out_specs=[
            pl.BlockSpec((None, None, dim), lambda p, g: (p, g, 0)),
            pl.BlockSpec((None, 1), lambda p, g: (p, g)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, unrotated.dtype),
            jax.ShapeDtypeStruct(queries.shape[:2], jnp.float32),
        ],
        warps=4,
        stages=1,
        interpret=interpret,
        name="sharded_decode_attention_join",
    )(*results)
    return out.reshape(unrotated.shape)
