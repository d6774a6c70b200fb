"""Triton kernels of `expert_mlp` for the few tokens of a decoding step.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

There is a row of programs for each pair of a token and one of its experts. Programs of a pair whose expert an earlier
pair has do nothing. The others read the expert's matrices once, multiply all tokens, and write the results of those
that have the expert. So no pairs have to be sorted, and each pair's result depends on its token alone.

The RMS norm of a single token needs no separate pass, as in `projection`. A single token with matrices in MXFP4 is
computed by `one_token_pallas_triton.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..activations import gated
from ..projection.quantized import GroupedMatrix, Matrix
from ..projection.quantized_pallas_triton import in_order_of
from ..projection.types import FEW_ROWS, Norm
from ..triton import backend, dividing_block, triton_call, triton_unsupported
from ..tuning import tuned
from .mxfp4_pallas_triton import Codes, codes_of, member_order, products
from .one_token_pallas_triton import expert_outputs
from .tiles import Biases, unsupported

FEW_PAIRS = 128
"""Maximum number of pairs of a token and an expert."""

OUTPUTS = 16
"""Outputs of a program: the least that the matrix units multiply. In MXFP4, the least number."""


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
    if x.shape[0] > FEW_ROWS or experts.size > FEW_PAIRS:
        return f"{x.shape[0]} tokens with {experts.size} pairs are more than {FEW_ROWS} or {FEW_PAIRS}"
    if not all(isinstance(w, GroupedMatrix) and w.is_mxfp4 for w in (gate, up, down)):
        return unsupported(x, gate, up, down)
    if x.dtype != jnp.bfloat16:
        return f"tokens are in {x.dtype}, not bfloat16"
    if x.shape[1] % OUTPUTS or down.shape[1] % OUTPUTS:
        return f"{x.shape[1]} channels or {down.shape[1]} hidden units are not a multiple of {OUTPUTS}"
    return triton_unsupported()


def expert_mlp(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    biases: Biases | None = None,
    *,
    norm: Norm | None,
    activation: str,
    total: int | None,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "R D"]:
    """Sum the outputs of each token's experts; see the public function.

    Args:
        sizes: `inputs` read at a time, `warps` and `stages`, instead of the tuned sizes. In MXFP4, `inputs` are those of
            each group, and there are also the `outputs` of a program. A single token in MXFP4 has the sizes of
            `one_token_pallas_triton.py`.
    """
    packed = isinstance(gate, GroupedMatrix)
    sizes = sizes or _sizes(x.shape[0], x.shape[1], down.shape[1], packed)
    if packed and x.shape[0] == 1:
        gain, eps, offset = norm or (None, None, None)
        options = {"activation": activation, "eps": eps, "offset": offset, "interpret": interpret, **sizes}
        outs = expert_outputs(experts.reshape(-1), x, gain, gate, up, down, biases, **options)
        return _weighted(outs, experts, weights, down.shape[0] // x.shape[1], total)
    if norm is not None and x.shape[0] > 1:
        x, norm = norm(x), None
    gain, eps, offset = norm or (None, None, None)
    options = {"activation": activation, "eps": eps, "offset": offset, "interpret": interpret, **sizes}
    outs = _call(experts.reshape(-1), in_order_of(x, gate), gain, gate, up, down, biases, **options)
    return _weighted(outs, experts, weights, down.shape[0] // x.shape[1], total)


def _weighted(
    outs: Float[Array, "P D"], experts: Int[Array, "R k"], weights: Float[Array, "R k"], count: int, total: int | None
) -> Float[Array, "R D"]:
    """Sum the outputs of each token's experts."""
    outs = outs.reshape(*experts.shape, -1)
    if total is not None:
        here = (experts >= 0) & (experts < count)
        outs = jnp.where(here[..., None], outs, 0.0)  # nobody wrote the others
    return jnp.sum(outs * weights[..., None], axis=1)


@functools.partial(
    jax.jit,
    static_argnames=("activation", "eps", "offset", "interpret", "inputs", "warps", "stages", "outputs"),
)
def _call(
    pairs: Array,
    x: Array,
    gain: Array | None,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    biases: Biases | None,
    *,
    activation: str,
    eps: float | None,
    offset: float | None,
    interpret: bool,
    inputs: int,
    warps: int,
    stages: int,
    outputs: int = OUTPUTS,
) -> Float[Array, "P D"]:
    """Call the kernels. They are traced and lowered once for all layers."""
    (rows, dim), width, count = x.shape, down.shape[1], len(pairs)
    padded = max(8, pl.next_power_of_2(rows))
    options = {"experts": down.shape[0] // dim, "padded": padded, "interpreted": interpret}
    call = functools.partial(triton_call, warps=warps, stages=stages, interpret=interpret, name="expert_mlp")
    matrices: list[Any] = [codes_of(w) if isinstance(w, GroupedMatrix) else w for w in (gate, up, down)]
    first, second = inputs, inputs
    if not isinstance(gate, GroupedMatrix):
        first, second = dividing_block(dim, inputs), dividing_block(width, 2 * inputs)
    normed = {"eps": eps, "offset": offset}
    block = dividing_block(width, outputs)
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    hidden = call(
        functools.partial(_hidden, **options, **normed, inputs=first, outputs=block, activation=activation),
        grid=(count, width // block),
        out_shape=jax.ShapeDtypeStruct((count, width), x.dtype),
    )(pairs, x, *matrices[:2], gain, gate_bias, up_bias)
    block = dividing_block(dim, outputs)
    return call(
        functools.partial(_outputs, **options, rows=rows, inputs=second, outputs=block),
        grid=(count, dim // block),
        out_shape=jax.ShapeDtypeStruct((count, dim), jnp.float32),
    )(pairs, hidden, matrices[2], down_bias)


def _sizes(rows: int, dim: int, width: int, packed: bool) -> dict[str, int]:
    """Return block sizes: inputs read at a time, warps and stages; in MXFP4, those that `expert_mlp` names.

    By default, they are the best on an H100. Those of a single token in MXFP4 are the best on an H200.
    """
    case = {"rows": rows, "inputs": dim, "hidden": width}
    if packed:
        several = {"inputs": 4, "warps": 4, "stages": 3, "outputs": 64}
        single = {"units": 32, "outputs": 32, "warps": 16, "together": 4}
        return tuned("expert_mlp_mxfp4", case, single if rows == 1 else several)
    return tuned("expert_mlp", case, {"inputs": 256, "warps": 1, "stages": 3})


def _hidden(
    pairs_ref: Any,
    x_ref: Any,
    gate: Any,
    up: Any,
    gain_ref: Any,
    gate_bias_ref: Any,
    up_bias_ref: Any,
    hidden_ref: Any,
    *,
    experts: int,
    padded: int,
    inputs: int,
    outputs: int,
    activation: str,
    eps: float | None,
    offset: float | None,
    interpreted: bool,
) -> None:
    """Compute a block of an expert's hidden units, for the pairs that have the expert."""
    pair, block = pl.program_id(0), pl.program_id(1)
    (rows, _), width = x_ref.shape, hidden_ref.shape[1]
    expert, is_first = _expert(pairs_ref, pair, experts, rows)

    @pl.when(is_first)
    def _() -> None:
        begin = expert * width + block * outputs
        if isinstance(gate, Codes):
            row = jnp.arange(padded, dtype=jnp.int32)
            load = functools.partial(_some, x_ref, row, row < rows)
            sums = products(
                [gate, up], load, begin, outputs, members=inputs // 2, padded=padded, interpreted=interpreted
            )
        else:
            sums = _normed_sums(x_ref, (gate, up), gain_ref, begin, padded, inputs, eps, offset)
        # Round as separate calls for each product would.
        first, second = (
            _biased(total.astype(x_ref.dtype), bias, begin).astype(jnp.float32)
            for total, bias in zip(sums, (gate_bias_ref, up_bias_ref), strict=True)
        )
        groups = width // 32 if isinstance(gate, Codes) else None
        _write(pairs_ref, hidden_ref, pair, expert, block, gated(activation, first, second), rows, groups)


def _normed_sums(
    x_ref: Any,
    matrices: tuple[Any, Any],
    gain_ref: Any,
    begin: Array,
    padded: int,
    inputs: int,
    eps: float | None,
    offset: float | None,
) -> list[Float[Array, "O N"]]:
    """Multiply tokens by outputs of two matrices from output `begin` on, and norm a single token if it has a gain."""
    rows, dim = x_ref.shape
    row = jnp.arange(padded, dtype=jnp.int32)
    exists = jnp.broadcast_to(row[:, None] < rows, (padded, inputs))

    def step(i: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        sums, squares = carry
        at = pl.ds(i * inputs, inputs)
        if gain_ref is None:
            column = i * inputs + jnp.arange(inputs, dtype=jnp.int32)
            some = backend.load(x_ref.at[row[:, None], column[None]], mask=exists, other=jnp.zeros((), x_ref.dtype))
        else:
            wide = x_ref[0, at].astype(jnp.float32)
            squares += wide * wide
            gain = gain_ref[at].astype(jnp.float32) + (offset or 0.0)
            own = (wide * gain).astype(x_ref.dtype)
            some = jnp.where(exists, own[None], jnp.zeros((), x_ref.dtype))
        weights = [ref[pl.ds(begin, OUTPUTS), at] for ref in matrices]
        return [total + _across(w, some) for total, w in zip(sums, weights, strict=True)], squares

    nothing = jnp.zeros((OUTPUTS, padded), jnp.float32)
    squares = jnp.zeros((inputs,) if gain_ref is not None else (), jnp.float32)
    sums, squares = jax.lax.fori_loop(0, dim // inputs, step, ([nothing, nothing], squares))
    if eps is None:
        return sums
    root = jax.lax.rsqrt(jnp.sum(squares) / dim + eps)
    return [total * root for total in sums]


def _outputs(
    pairs_ref: Any,
    hidden_ref: Any,
    down: Any,
    bias_ref: Any,
    out_ref: Any,
    *,
    experts: int,
    padded: int,
    rows: int,
    inputs: int,
    outputs: int,
    interpreted: bool,
) -> None:
    """Compute a block of an expert's outputs, for the pairs that have the expert."""
    pair, block = pl.program_id(0), pl.program_id(1)
    width, dim = hidden_ref.shape[1], out_ref.shape[1]
    expert, is_first = _expert(pairs_ref, pair, experts, rows)

    @pl.when(is_first)
    def _() -> None:
        place, has = _places(pairs_ref, pair, expert, rows, padded)
        begin = expert * dim + block * outputs
        if isinstance(down, Codes):
            load = functools.partial(_some, hidden_ref, place, has)
            how = {"members": inputs // 2, "padded": padded, "interpreted": interpreted}
            (total,) = products([down], load, begin, outputs, **how)
        else:
            exists = jnp.broadcast_to(has[:, None], (padded, inputs))

            def step(i: Array, total: Array) -> Array:
                column = i * inputs + jnp.arange(inputs, dtype=jnp.int32)
                some = backend.load(
                    hidden_ref.at[place[:, None], column[None]], mask=exists, other=jnp.zeros((), hidden_ref.dtype)
                )
                return total + _across(down[pl.ds(begin, OUTPUTS), pl.ds(i * inputs, inputs)], some)

            total = jax.lax.fori_loop(0, width // inputs, step, jnp.zeros((OUTPUTS, padded), jnp.float32))
        _write(pairs_ref, out_ref, pair, expert, block, _biased(total, bias_ref, begin), rows)


def _some(
    ref: Any, row: Int[Array, " N"], has: Bool[Array, " N"], column: Int[Array, "_ I"], exists: Bool[Array, " I"]
) -> Float[Array, "N I"]:
    """Load columns of rows, with zeros for what does not exist."""
    mask = has[:, None] & exists[None]
    return backend.load(ref.at[row[:, None], column], mask=mask, other=jnp.zeros((), ref.dtype))


def _across(weights: Float[Array, "O I"], some: Float[Array, "N I"]) -> Float[Array, "O N"]:
    return jax.lax.dot_general(weights, some, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _biased(values: Float[Array, "O N"], bias_ref: Any, begin: Array) -> Float[Array, "O N"]:
    """Add the biases of outputs from output `begin` on, if there are any."""
    if bias_ref is None:
        return values
    bias = bias_ref[pl.ds(begin, len(values))].astype(values.dtype)
    return values + bias[:, None]


def _expert(pairs_ref: Any, pair: Array, experts: int, rows: int) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The expert of a pair, and whether it exists and no earlier pair has it."""
    expert = pairs_ref[pair]
    exists = (expert >= 0) & (expert < experts)
    if rows == 1:
        return expert, exists
    count, at = pairs_ref.shape[0], jnp.arange(pl.next_power_of_2(pairs_ref.shape[0]), dtype=jnp.int32)
    every = backend.load(pairs_ref.at[at], mask=at < count, other=-1)
    earlier = jnp.max(jnp.where((every == expert) & (at < pair), 1, 0))
    return expert, exists & (earlier == 0)


def _places(
    pairs_ref: Any, pair: Array, expert: Array, rows: int, padded: int
) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """The pair of each token that has the expert, and whether there is one. Other tokens get places after all pairs."""
    count, row = pairs_ref.shape[0], jnp.arange(padded, dtype=jnp.int32)
    if rows == 1:
        return jnp.where(row == 0, pair, count + row), row == 0
    at = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    every = backend.load(pairs_ref.at[at], mask=at < count, other=-1)
    own = (at[None] // (count // rows) == row[:, None]) & (every == expert)[None]
    found = jnp.max(jnp.where(own, at[None], -1), axis=1)
    return jnp.where(found >= 0, found, count + row), found >= 0


def _write(
    pairs_ref: Any,
    ref: Any,
    pair: Array,
    expert: Array,
    block: Array,
    values: Float[Array, "O N"],
    rows: int,
    groups: int | None = None,
) -> None:
    """Write a block of values to the pairs of the tokens that have the expert, in the order of members of groups if any."""
    place, has = _places(pairs_ref, pair, expert, rows, values.shape[1])
    column = block * len(values) + jnp.arange(len(values), dtype=jnp.int32)
    if groups is not None:
        column = member_order(column, groups)
    mask = jnp.broadcast_to(has[None], values.shape)
    backend.store(ref.at[place[None], column[:, None]], values.astype(ref.dtype), mask=mask)
