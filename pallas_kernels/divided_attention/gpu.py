"""Attention over divided heads for GPUs, as a Triton body: the parts of all caches in one grid.

What a program does is what it does in `decode_attention`; which cache, head and part it is for, it finds by its number.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..decode_attention import gpu as undivided
from ..divided import head_at, is_among, place_among
from ..rotary import Turned

if TYPE_CHECKING:
    from .api import Held

PROGRAMS = 512
"""At most, so that all are on the device at once."""


class Share(NamedTuple):
    """Programs of one cache.

    Attributes:
        heads: of the layer, that it has.
        slots: its capacity.
        begin, programs: the first, and how many there are.
        parts: how many a head.
    """

    heads: tuple[int, ...]
    slots: int
    begin: int
    programs: int
    parts: int


def refuses(q: Array, caches: Sequence["Held"]) -> str | None:
    """Why this body does not serve a case, or None if it does."""
    group = q.shape[1] // sum(len(held.heads) for held in caches)
    for held in caches:
        if reason := undivided.refuses(q[:, : group * len(held.heads)], held.k, None):
            return reason
    return None


def divided_attention(
    q: Float[Array, "B N H"] | Turned,
    caches: Sequence["Held"],
    *,
    scale: float,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B N H"]:
    """Attention of each head over its cache; see the public function.

    Args:
        sizes: `block` slots read at a time, blocks of a `part`, `warps` and `stages` of each program, instead of the usual ones.
    """
    # What does not fit at once then waits for its turn with short parts.
    caches = sorted(caches, key=lambda held: -held.k.shape[2])
    arrays = [(held.k, held.v, held.weight) for held in caches]
    sizes = sizes or _sizes([held.k for held in caches])
    heads = tuple(tuple(held.heads) for held in caches)
    return _attend(q, arrays, heads=heads, scale=scale, interpret=interpret, **sizes)


def _sizes(keys: Sequence[Array]) -> dict[str, int]:
    """Blocks of 16 KB of keys, and parts of as few as there are programs for; of two halves if one would do."""
    dim, dtype = keys[0].shape[-1], keys[0].dtype
    smallest = min(k.shape[2] for k in keys)
    block = max(
        16, min(128, 1 << ((16384 // (dim * dtype.itemsize)).bit_length() - 1), 1 << (smallest.bit_length() - 1))
    )
    blocks = sum(k.shape[0] * k.shape[1] * -(-k.shape[2] // block) for k in keys)
    part = -(-blocks // PROGRAMS)
    if part == 1 and block > 16:
        block, part = block // 2, 2
    return {"block": block, "part": part, "warps": 4, "stages": 2 if block > 64 else 3}


@functools.partial(jax.jit, static_argnames=("heads", "scale", "interpret", "block", "part", "warps", "stages"))
def _attend(
    q: Float[Array, "B N H"] | Turned,
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
    """The kernels, traced and lowered once for all layers of one shape."""
    heads_of = q.x if isinstance(q, Turned) else q
    batch, count, dim = heads_of.shape
    kv_heads = sum(map(len, heads))
    group, part = count // kv_heads, part * block
    queries = heads_of.reshape(batch * kv_heads, group, dim)
    tables = [q.cos, q.sin] if isinstance(q, Turned) else []

    shares, inputs, specs, shapes, out_specs, begin = [], [], [], [], [], 0
    for (k, v, weight), mine in zip(caches, heads, strict=True):
        slots, fold = k.shape[2], batch * len(mine)
        parts = -(-slots // part)
        share = Share(mine, slots, begin, fold * parts, parts)
        begin += share.programs
        shares.append(share)
        at = functools.partial(_places, share)

        def asked(p: Any, at: Callable[[Any], Any] = at, share: Share = share) -> tuple[Any, int, int]:
            head, _ = at(p)
            return head // len(share.heads) * kv_heads + head_at(head % len(share.heads), share.heads), 0, 0

        def row(p: Any, at: Callable[[Any], Any] = at, share: Share = share) -> tuple[Any, int]:
            return at(p)[0] // len(share.heads), 0

        whole, line = _block(at, None, slots, dim), _block(at, None, slots)
        inputs += [queries, k.reshape(fold, slots, dim), v.reshape(fold, slots, dim), weight.reshape(fold, slots)]
        specs += [pl.BlockSpec((None, group, dim), asked), whole, whole, line]
        inputs += tables
        specs += [pl.BlockSpec((1, dim // 2), row) for _ in tables]
        shapes += [jax.ShapeDtypeStruct((fold, parts, group, *rest), jnp.float32) for rest in ((dim,), (), ())]
        out_specs += [_block(at, None, None, group, *rest) for rest in ((dim,), (), ())]
    each = 4 + len(tables)

    def body(*refs: Any) -> None:
        program, outs = pl.program_id(0), refs[each * len(shares) :]
        for i, share in enumerate(shares):
            mine = [*refs[each * i : each * (i + 1)], *outs[3 * i : 3 * (i + 1)]]

            @pl.when((program >= share.begin) & (program < share.begin + share.programs))
            def _attend_part(mine: list[Any] = mine, share: Share = share) -> None:
                undivided.attend_part(
                    *mine,
                    number=_places(share, program)[1],
                    scale=scale,
                    block=block,
                    part=part,
                    slots=share.slots,
                    turned="queries" if tables else "nothing",
                )

    def join(*refs: Any) -> None:
        head = pl.program_id(0) % kv_heads
        for i, share in enumerate(shares):
            mine = *refs[3 * i : 3 * (i + 1)], *refs[-2:]
            pl.when(is_among(head, share.heads))(functools.partial(undivided.join_parts, *mine))

    joined = []
    for share in shares:

        def held(p: Any, share: Share = share) -> Any:
            return p // kv_heads * len(share.heads) + place_among(p % kv_heads, share.heads)

        def kept(p: Any, held: Callable[[Any], Any] = held, share: Share = share) -> Any:
            return jax.lax.min(held(p), batch * len(share.heads) - 1)

        joined += [
            pl.BlockSpec((None, share.parts, None, dim), lambda p, g, kept=kept: (kept(p), 0, g, 0)),
            *(pl.BlockSpec((None, share.parts, None), lambda p, g, kept=kept: (kept(p), 0, g)) for _ in range(2)),
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        results = pl.pallas_call(
            body,
            grid=(begin,),
            in_specs=specs,
            out_specs=out_specs,
            out_shape=shapes,
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name="divided_attention",
        )(*inputs)
        out, _ = pl.pallas_call(
            join,
            grid=(batch * kv_heads, group),
            in_specs=joined,
            out_specs=[
                pl.BlockSpec((None, None, dim), lambda p, g: (p, g, 0)),
                pl.BlockSpec((None, 1), lambda p, g: (p, g)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct(queries.shape, heads_of.dtype),
                jax.ShapeDtypeStruct(queries.shape[:2], jnp.float32),
            ],
            compiler_params=backend.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="divided_attention_join",
        )(*results)
    return out.reshape(heads_of.shape)


def _places(share: Share, program: Any) -> tuple[Any, Any]:
    """Row and head of its cache, as one number, and part, of a program; some that exist if it has another cache."""
    number = jax.lax.clamp(0, program - share.begin, share.programs - 1)
    return number // share.parts, number % share.parts


def _block(at: Callable[[Any], Any], *shape: int | None) -> pl.BlockSpec:
    """All that a program reads or writes of an array that begins with row and head, and part where that is the second one."""
    first = 1 if len(shape) < 2 or shape[1] is not None else 2
    return pl.BlockSpec(shape, lambda p: (*at(p)[:first], *(0,) * (len(shape) - first)))
