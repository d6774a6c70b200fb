"""Triton kernels of `expert_mlp` for the many tokens of prefill and of large batches: grouped matmuls.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

Pairs of a token and one of its experts are sorted by expert and cut into tiles of one expert each. A program computes a
block of the hidden units, or of the outputs, of a tile. It gathers the tile's tokens as it reads them. Outputs are
written to their pairs, so that each token's sum is in the order of its experts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..activations import ACTIVATIONS
from ..products import dot
from ..projection.types import Norm
from ..triton import backend, triton_call
from ..tuning import tuned
from .tiles import Biases, sorted_pairs, tile_size, tiles, unsupported

AT_A_TIME = 4096
"""Maximum number of tokens that are computed at a time. The outputs of all their pairs are in memory, in float32."""


def unsupported_reason(
    x: Array,
    experts: Array,
    weights: Array,
    gate: Any,
    up: Any,
    down: Any,
    biases: Biases | None = None,
    *,
    norm: Norm | None,
    activation: str,
    total: int | None,
) -> str | None:
    """Return why these kernels do not support a case, or None if they do."""
    if biases is not None or activation not in ACTIVATIONS:
        return f"the experts have biases, or the activation {activation}"
    return unsupported(x, gate, up, down)


def expert_mlp(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate: Float[Array, "EF D"],
    up: Float[Array, "EF D"],
    down: Float[Array, "ED F"],
    biases: None = None,
    *,
    norm: Norm | None,
    activation: str,
    total: int | None,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "R D"]:
    """Sum the outputs of each token's experts; see the public function.

    Args:
        sizes: `pairs` of a tile, `columns` of a program, `inputs` read at a time, `warps` and `stages`, instead of the
            tuned sizes.
    """
    x = x if norm is None else norm(x)
    (rows, dim), local = x.shape, down.shape[0] // x.shape[1]
    sizes = sizes or _sizes(min(rows, AT_A_TIME) * experts.shape[1], total or local, dim, down.shape[1])

    def some(given: tuple[Array, Array, Array]) -> Float[Array, "S D"]:
        x, experts, weights = given
        own, order = sorted_pairs(experts, local)
        options = {"activation": activation, "interpret": interpret, "each": experts.shape[1], **sizes}
        outs = _call(x, order, tiles(own, local, sizes["pairs"]), gate, up, down, **options)
        outs = outs.reshape(*experts.shape, -1)
        if total is not None:
            outs = jnp.where((own < local).reshape(experts.shape)[..., None], outs, 0.0)  # nobody wrote the others
        return jnp.sum(outs * weights[..., None], axis=1)

    if rows <= AT_A_TIME:
        return some((x, experts, weights))
    parts = -(-rows // AT_A_TIME)
    size = -(-rows // parts)
    divided = (jnp.pad(y, ((0, parts * size - rows), (0, 0))).reshape(parts, size, -1) for y in (x, experts, weights))
    return jax.lax.map(some, tuple(divided)).reshape(parts * size, dim)[:rows]


def _sizes(pairs: int, experts: int, dim: int, width: int) -> dict[str, int]:
    """Return block sizes: tiles as large as the load of an expert allows."""
    size = tile_size(pairs, experts, 16, 128)
    default = {
        "pairs": size,
        "columns": 64 if size < 64 else 128,
        "inputs": 64,
        "warps": 8 if size > 64 else 4,
        "stages": 4,
    }
    return tuned("expert_mlp", {"pairs": pairs, "experts": experts, "inputs": dim, "hidden": width}, default)


@functools.partial(
    jax.jit, static_argnames=("activation", "interpret", "each", "pairs", "columns", "inputs", "warps", "stages")
)
def _call(
    x: Array,
    order: Array,
    each_tile: Any,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: str,
    interpret: bool,
    each: int,
    pairs: int,
    columns: int,
    inputs: int,
    warps: int,
    stages: int,
) -> Float[Array, "P D"]:
    """Call the kernels. They are traced and lowered once for all layers."""
    dim, width, count = x.shape[1], down.shape[1], len(order)
    options = {"pairs": pairs, "columns": columns, "inputs": inputs}
    call = functools.partial(triton_call, warps=warps, stages=stages, interpret=interpret, name="expert_mlp")
    hidden = call(
        functools.partial(_hidden, **options, each=each, activation=activation),
        grid=(len(each_tile.expert), width // columns),
        out_shape=jax.ShapeDtypeStruct((count, width), x.dtype),
    )(*each_tile, order, x, gate, up)
    return call(
        functools.partial(_outputs, **options),
        grid=(len(each_tile.expert), dim // columns),
        out_shape=jax.ShapeDtypeStruct((count, dim), jnp.float32),
    )(*each_tile, order, hidden, down)


def _hidden(
    expert_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    order_ref: Any,
    x_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    hidden_ref: Any,
    *,
    pairs: int,
    columns: int,
    inputs: int,
    each: int,
    activation: str,
) -> None:
    """Compute a block of the hidden units of a tile, in the order of the tiles."""
    tile, block = pl.program_id(0), pl.program_id(1)
    dim, width = x_ref.shape[1], hidden_ref.shape[1]
    expert, start, stop = expert_ref[tile], start_ref[tile], stop_ref[tile]

    @pl.when(start < stop)
    def _() -> None:
        place, exists = _tile(start, stop, pairs)
        row = backend.load(order_ref.at[place], mask=exists, other=0) // each
        begin = expert * width + block * columns

        def step(i: Array, sums: list[Array]) -> list[Array]:
            some = _gathered(x_ref, row, exists, i * inputs, inputs)
            at = pl.ds(begin, columns), pl.ds(i * inputs, inputs)
            return [total + dot(some, ref[at], 1) for total, ref in zip(sums, (gate_ref, up_ref), strict=True)]

        nothing = jnp.zeros((pairs, columns), jnp.float32)
        sums = jax.lax.fori_loop(0, dim // inputs, step, [nothing, nothing])
        # Round as separate calls for each product would.
        first, second = (total.astype(x_ref.dtype).astype(jnp.float32) for total in sums)
        _scatter(hidden_ref, place, exists, block, ACTIVATIONS[activation](first) * second)


def _outputs(
    expert_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    order_ref: Any,
    hidden_ref: Any,
    down_ref: Any,
    out_ref: Any,
    *,
    pairs: int,
    columns: int,
    inputs: int,
) -> None:
    """Compute a block of the outputs of a tile, and write each to its pair."""
    tile, block = pl.program_id(0), pl.program_id(1)
    width, dim = hidden_ref.shape[1], out_ref.shape[1]
    expert, start, stop = expert_ref[tile], start_ref[tile], stop_ref[tile]

    @pl.when(start < stop)
    def _() -> None:
        place, exists = _tile(start, stop, pairs)
        begin = expert * dim + block * columns

        def step(i: Array, total: Array) -> Array:
            some = _gathered(hidden_ref, place, exists, i * inputs, inputs)
            return total + dot(some, down_ref[pl.ds(begin, columns), pl.ds(i * inputs, inputs)], 1)

        total = jax.lax.fori_loop(0, width // inputs, step, jnp.zeros((pairs, columns), jnp.float32))
        # What does not exist has places after all pairs.
        pair = backend.load(order_ref.at[place], mask=exists, other=0)
        _scatter(out_ref, jnp.where(exists, pair, order_ref.shape[0] + place), exists, block, total)


def _tile(start: Array, stop: Array, pairs: int) -> tuple[Int[Array, " N"], Array]:
    """Places of a tile's pairs, and whether they exist."""
    place = start + jnp.arange(pairs, dtype=jnp.int32)
    return place, place < stop


def _gathered(ref: Any, row: Array, exists: Array, first: Array, size: int) -> Float[Array, "N I"]:
    """Load some columns of rows, with zeros for those that do not exist."""
    column = first + jnp.arange(size, dtype=jnp.int32)
    mask = jnp.broadcast_to(exists[:, None], (row.size, size))
    return backend.load(ref.at[row[:, None], column[None]], mask=mask, other=jnp.zeros((), ref.dtype))


def _scatter(ref: Any, row: Array, exists: Array, block: Array, values: Float[Array, "N C"]) -> None:
    """Store a block of columns of rows that exist."""
    column = block * values.shape[1] + jnp.arange(values.shape[1], dtype=jnp.int32)
    mask = jnp.broadcast_to(exists[:, None], values.shape)
    backend.store(ref.at[row[:, None], column[None]], values.astype(ref.dtype), mask=mask)
