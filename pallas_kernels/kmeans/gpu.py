"""k-means on GPUs, as two Triton bodies an iteration: the search for the nearest centroid, and the sums over clusters."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import triton
from ..nearest import gpu as nearest
from ..nearest.gpu import LEAST, load_rows
from ..tuning import tuned
from .lloyd import Distance, lloyd

PROGRAMS = 528
"""About how many are wanted: four for each of an H200's multiprocessors."""


def refuses(x: Array) -> str | None:
    """Why these bodies do not serve a case, or None if they do."""
    return triton() or nearest.refuses(x, x)


def kmeans(
    x: Float[Array, "B K T H"],
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    *,
    iterations: int,
    distance: Distance,
    interpret: bool = False,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Lloyd's algorithm; see the public function."""

    def assign(centroids: Array, bias: Array) -> Int[Array, "B K T"]:
        return nearest.nearest(x, centroids, bias, interpret=interpret).place

    total = functools.partial(cluster_sums, x, size=init.shape[2], interpret=interpret)
    return lloyd(mask, init, clusters, assign, total, dtype=x.dtype, iterations=iterations, distance=distance)


def cluster_sums(
    x: Float[Array, "B K T H"],
    labels: Int[Array, "B K T"],
    *,
    size: int,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]:
    """The sum over each cluster's tokens and their number, in float32 and in a fixed order.

    A program takes some clusters and a part of the tokens, and adds up products of one-hot labels and tokens. The parts are
    joined by plain XLA.

    Args:
        labels: each token's cluster; tokens with labels of `size` or more belong to none, and are not even read.
        sizes: `clusters` of a program, `tokens` that it takes at a time, `splits` of all tokens, `warps` and `stages`.
    """
    batch, heads, tokens, dim = x.shape
    groups = batch * heads
    sizes = sizes or _sizes(groups, tokens, size, dim, x.dtype)
    rows, block = sizes["clusters"], sizes["tokens"]
    part = pl.cdiv(pl.cdiv(tokens, sizes["splits"]), block) * block
    splits = pl.cdiv(tokens, part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        sums, counts = pl.pallas_call(
            functools.partial(_body, rows=rows, block=block, part=part),
            grid=(groups, splits, pl.cdiv(size, rows)),
            in_specs=[
                pl.BlockSpec((None, tokens, dim), lambda g, s, c: (g, 0, 0)),
                pl.BlockSpec((None, tokens), lambda g, s, c: (g, 0)),
            ],
            out_specs=[
                pl.BlockSpec((None, None, size, dim), lambda g, s, c: (g, s, 0, 0)),
                pl.BlockSpec((None, None, size), lambda g, s, c: (g, s, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((groups, splits, size, dim), jnp.float32),
                jax.ShapeDtypeStruct((groups, splits, size), jnp.float32),
            ],
            compiler_params=backend.CompilerParams(num_warps=sizes["warps"], num_stages=sizes["stages"]),
            interpret=interpret,
            name="cluster_sums",
        )(x.reshape(groups, tokens, dim), labels.reshape(groups, tokens))
    sums, counts = jnp.sum(sums, axis=1), jnp.sum(counts, axis=1)
    return sums.reshape(batch, heads, size, dim), counts.reshape(batch, heads, size)


def _sizes(groups: int, tokens: int, clusters: int, dim: int, dtype: Any) -> dict[str, int]:
    """Block sizes: as many clusters to a program as registers allow, since each program reads its tokens anew."""
    rows = min(128, max(LEAST, pl.next_power_of_2(clusters)))
    splits = max(1, min(pl.cdiv(PROGRAMS, groups * pl.cdiv(clusters, rows)), tokens // 512))
    default = {
        "clusters": rows,
        "tokens": 64,
        "splits": splits,
        "warps": 8 if rows * dim > 64 * 128 else 4,
        "stages": 3,
    }
    case = {"groups": groups, "tokens": tokens, "clusters": clusters, "head_dim": dim, "dtype": jnp.dtype(dtype).name}
    return tuned("cluster_sums", case, default)


def _body(x_ref: Any, labels_ref: Any, sums_ref: Any, counts_ref: Any, *, rows: int, block: int, part: int) -> None:
    from jax.experimental.pallas import triton as backend

    (tokens, dim), size = x_ref.shape, counts_ref.shape[0]
    first = pl.program_id(2) * rows
    begin = pl.program_id(1) * part
    cluster = first + jnp.arange(rows, dtype=jnp.int32)

    def add(i: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, counts = total
        start = begin + i * block
        inside = start + jnp.arange(block, dtype=jnp.int32) < tokens
        labels = jnp.where(inside, load_rows(labels_ref, start, block, tokens), size)
        taken = jnp.broadcast_to((labels < size)[:, None], (block, dim))
        x = backend.load(x_ref.at[pl.ds(start, block)], mask=taken, other=jnp.zeros((), x_ref.dtype))
        member = labels[None] == cluster[:, None]
        for piece in _pieces(x):
            sums += jax.lax.dot_general(
                member.astype(piece.dtype), piece, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        return sums, counts + jnp.sum(member.astype(jnp.float32), axis=1)

    nothing = jnp.zeros((rows, dim), jnp.float32), jnp.zeros((rows,), jnp.float32)
    steps = pl.cdiv(jnp.minimum(part, tokens - begin), block)
    sums, counts = jax.lax.fori_loop(0, steps, add, nothing)
    exists = None if size % rows == 0 else cluster < size
    wide = None if exists is None else jnp.broadcast_to(exists[:, None], (rows, dim))
    backend.store(sums_ref.at[pl.ds(first, rows)], sums, mask=wide)
    backend.store(counts_ref.at[pl.ds(first, rows)], counts, mask=exists)


def _pieces(x: Float[Array, "T H"]) -> list[Array]:
    """Arrays of 16 bits that add up to `x` exactly, since tensor cores multiply no more: one for 16 bits, three for float32."""
    if x.dtype != jnp.float32:
        return [x]
    pieces = []
    for _ in range(3):
        pieces.append(x.astype(jnp.bfloat16))
        x = x - pieces[-1].astype(jnp.float32)
    return pieces
