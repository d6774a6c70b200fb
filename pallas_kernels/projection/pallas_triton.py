"""Triton kernels of `projection` and `gated_projection`: matmuls of a few rows. They read each weight once.

`Op` in `api.py` calls them for the cases that `unsupported_reason` permits, unless XLA is as fast. Results must match
`reference.py` up to rounding.

A program computes a block of outputs. It loops over the inputs and its part of the weights, and writes only the
outputs.

The RMS norm of a single row needs no separate pass. Inputs are multiplied by the gain as they are read, and their
squares are summed beside the products. At the end, the products are divided by the root mean square.

The matrix units multiply, with rows padded by zeros to the minimum. The exception is a single normed row, which is
multiplied and summed in registers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..triton import backend, dividing_block, triton_call, triton_unsupported
from ..tuning import tuned
from .quantized import GroupedMatrix, Matrix, QuantizedMatrix
from .quantized_pallas_triton import alike, in_order_of, products, products_of_one, unsupported_weights, with_sums_of
from .types import FEW_ROWS, Norm


def unsupported_reason(x: Array, weights: Sequence[Matrix], **_: Any) -> str | None:
    """Return why these kernels do not support a case, or None if they do."""
    if reason := triton_unsupported():
        return reason
    if x.ndim != 2 or x.shape[0] > FEW_ROWS:
        return f"inputs have shape {x.shape}, not [B, D] with up to {FEW_ROWS} rows"
    packed = [w for w in weights if isinstance(w, QuantizedMatrix)]
    if packed and len(packed) < len(weights):
        return "some weights are quantised and others are not"
    if reason := unsupported_weights(packed):
        return reason
    if {x.dtype, *(w.dtype for w in weights if not isinstance(w, QuantizedMatrix))} != {jnp.dtype(jnp.bfloat16)}:
        return "not all arrays are bfloat16"
    if x.shape[1] % (128 if packed else 64):
        return f"{x.shape[1]} inputs are not a multiple of {128 if packed else 64}"
    if any(w.shape[0] % 16 for w in weights):
        return f"{[w.shape[0] for w in weights]} outputs are not multiples of 16"
    return None


def projection(
    x: Float[Array, "B D"],
    weights: Sequence[Matrix],
    *,
    norm: Norm | None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "B O"] | None,
    dtype: Any,
    gated: bool = False,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> list[Float[Array, "B _"]]:
    """Multiply by each of `weights`, or compute the gated product of two; see the public functions.

    Args:
        gated: whether to compute silu(first) · second.
        sizes: `outputs` per program, `inputs` read at a time, `warps`, `stages`, and whether the matrix `units`
            multiply, instead of the tuned sizes. For one row and quantised weights without matrix units, use fewer
            `inputs` than threads per program. Otherwise Triton converts codes to the inputs' layout through shared
            memory.
    """
    rows, depth = x.shape
    first = weights[0]
    kind = first.kind if isinstance(first, QuantizedMatrix) else ""
    group = depth // first.levels.shape[-1] if isinstance(first, GroupedMatrix) else 1
    # In the matmul loop, the norm costs more than as a separate step. Inputs of other dtypes or orders are written
    # again anyway.
    if norm is not None and (rows > 1 or kind):
        x, norm = norm(x), None
    if not alike(weights):
        options = {"norm": norm, "dtype": dtype, "interpret": interpret, "sizes": sizes}
        each = zip(weights, biases or [None] * len(weights), strict=True)
        outs = [projection(x, [w], biases=[b], residual=None, **options)[0] for w, b in each]
        return [jax.nn.silu(outs[0]) * outs[1]] if gated else outs
    counts = [w.shape[0] for w in weights]
    sizes = _sizes(rows, depth, counts, gated, norm is not None, kind, group) if sizes is None else sizes
    rounded = x.dtype
    x = with_sums_of(x, weights[0]) if kind and not sizes["units"] else in_order_of(x, weights[0])
    blocks = [count // sizes["outputs"] for count in (counts[:1] if gated else counts)]
    biases = list(biases or [])
    given = [b for b in biases if b is not None]
    inputs = [x, *([] if norm is None else [norm.gain]), *weights, *given, *([] if residual is None else [residual])]
    options = {
        "matrices": len(weights),
        "eps": None if norm is None else norm.eps,
        "offset": None if norm is None else norm.offset,
        "biased": tuple(b is not None for b in biases) or (False,) * len(weights),
        "added": residual is not None,
        "gated": gated,
        "outputs": sizes["outputs"],
        "inputs": sizes["inputs"],
        "units": bool(sizes["units"]),
        "blocks": tuple(blocks),
        "rounded": rounded,
        "interpreted": interpret,
    }
    return _call(
        inputs,
        options=tuple(options.items()),
        dtype=jnp.dtype(dtype),
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
    )


def gated_projection(
    x: Float[Array, "B D"], weights: Sequence[Matrix], *, norm: Norm | None = None, **options: Any
) -> Float[Array, "B O"]:
    """Compute the gated product of two matrices; `options` are as for `projection`."""
    (out,) = projection(x, weights, norm=norm, residual=None, dtype=x.dtype, gated=True, **options)
    return out


@functools.partial(jax.jit, static_argnames=("options", "dtype", "warps", "stages", "interpret"))
def _call(
    inputs: list[Any], *, options: tuple[tuple[str, Any], ...], dtype: Any, warps: int, stages: int, interpret: bool
) -> list[Float[Array, "B _"]]:
    """Call the kernel. It is traced and lowered once for all layers."""
    body = functools.partial(_body, **dict(options))
    rows, outputs, blocks = inputs[0].shape[0], body.keywords["outputs"], body.keywords["blocks"]
    products = triton_call(
        body,
        grid=(sum(blocks),),
        out_shape=[jax.ShapeDtypeStruct((rows, block * outputs), dtype) for block in blocks],
        warps=warps,
        stages=stages,
        interpret=interpret,
        name="projection",
    )(*inputs)
    return list(products)


def _sizes(
    rows: int, depth: int, counts: Sequence[int], gated: bool, normed: bool, kind: str, group: int
) -> dict[str, int]:
    """Return block sizes: 16 outputs per warp, with 16 to 40 KB of their weights in flight.

    They were tuned on an H200, in a chain of all four projections of layers with Llama-3.1-8B's shape. The best sizes
    of one projection are within 2 % of the best for the others. The exception is the gated pair, which reads two
    matrices at a time, and slows down with more than this in flight.
    """
    if normed and not gated:
        sizes = {"outputs": 4, "inputs": _block(depth, 1024), "warps": 4, "stages": 1, "units": 0}
    else:
        block = _block(depth, 128 if gated else 256)
        stages = 3 if gated else 5 if depth > 8192 else 4
        sizes = {"outputs": 16, "inputs": block, "warps": 1, "stages": stages, "units": 1}
    case = {"rows": rows, "inputs": depth, "outputs": sum(counts), "gated": gated, "kind": kind or "float"}
    return tuned("projection", case | {"group": group}, sizes)


def _block(depth: int, most: int) -> int:
    """Return how many inputs are read at a time: a divisor, or `most` with a mask if that would be less than 128."""
    return dividing_block(depth, most) if depth % 128 == 0 else most


def _body(
    x_ref: Any,
    *refs: Any,
    matrices: int,
    eps: float | None,
    offset: float | None,
    biased: Sequence[bool],
    added: bool,
    gated: bool,
    outputs: int,
    inputs: int,
    units: bool,
    blocks: Sequence[int],
    rounded: Any,
    interpreted: bool,
) -> None:
    """Compute one block of outputs of one matrix, or of the gated pair."""
    gain_ref, *rest = refs if eps is not None else (None, *refs)
    weight_refs, rest = rest[:matrices], rest[matrices:]
    bias_refs = [rest.pop(0) if has else None for has in biased]
    residual_ref, *out_refs = rest if added else (None, *rest)
    how = {"inputs": inputs, "outputs": outputs, "units": units, "interpreted": interpreted}
    multiply = functools.partial(_products, x_ref, gain_ref, eps=eps, offset=offset, **how)
    program = pl.program_id(0)  # outside the branch, since the interpreter does not support it inside
    if gated:
        first = program * outputs
        gate, up = multiply(weight_refs, first)
        # Round as separate calls for each product would.
        gate, up = gate.astype(rounded).astype(jnp.float32), up.astype(rounded).astype(jnp.float32)
        _write(out_refs[0], first, gate * jax.nn.sigmoid(gate) * up)
        return
    start = 0
    for weight_ref, bias_ref, out_ref, count in zip(weight_refs, bias_refs, out_refs, blocks, strict=True):
        here = (program >= start) & (program < start + count)

        def make(
            weight_ref: Any = weight_ref, bias_ref: Any = bias_ref, out_ref: Any = out_ref, start: int = start
        ) -> None:
            first = (program - start) * outputs
            (product,) = multiply([weight_ref], first)
            if bias_ref is not None:
                product += bias_ref[pl.ds(first, outputs)].astype(jnp.float32)[:, None]
            if residual_ref is not None:
                product = product.astype(rounded).astype(jnp.float32) + _read(residual_ref, first, product.shape)
            _write(out_ref, first, product)

        if len(blocks) == 1:
            make()
        else:
            pl.when(here)(make)
        start += count


def _products(
    x_ref: Any,
    gain_ref: Any,
    weight_refs: Sequence[Any],
    first: Array,
    *,
    eps: float | None,
    offset: float | None,
    inputs: int,
    outputs: int,
    units: bool,
    interpreted: bool,
) -> list[Float[Array, "O R"]]:
    """Multiply: `outputs` outputs of each matrix from output `first` on, in float32, for the rows, padded to R."""
    rows, depth = x_ref.shape
    padded = max(8, pl.next_power_of_2(rows)) if units else rows
    if isinstance(weight_refs[0], QuantizedMatrix):

        def read(at: Any) -> Array:
            return _rows(x_ref, at, padded)

        if units:
            return [products(w, read, first, outputs, padded, inputs) for w in weight_refs]
        return [products_of_one(w, read, first, outputs, inputs, interpreted) for w in weight_refs]

    def step(i: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        sums, squares = carry
        at = pl.ds(i * inputs, inputs)
        weights = [_weights(ref, first, outputs, at) for ref in weight_refs]
        x = _rows(x_ref, at, padded, masked=depth % inputs > 0)
        if gain_ref is not None:
            wide = x.astype(jnp.float32)
            squares += wide * wide
            x = wide * (_gain(gain_ref, at).astype(jnp.float32) + (offset or 0.0))
        if not units:
            x = x.astype(jnp.float32)
            return [total + w.astype(jnp.float32) * x for total, w in zip(sums, weights, strict=True)], squares
        x = x.astype(x_ref.dtype)
        across = (((1,), (1,)), ((), ()))
        products = [jax.lax.dot_general(w, x, across, preferred_element_type=jnp.float32) for w in weights]
        return [total + product for total, product in zip(sums, products, strict=True)], squares

    sums = [jnp.zeros((outputs, padded if units else inputs), jnp.float32) for _ in weight_refs]
    squares = jnp.zeros((padded, inputs) if gain_ref is not None else (), jnp.float32)
    sums, squares = jax.lax.fori_loop(0, pl.cdiv(depth, inputs), step, (sums, squares))
    if not units:
        sums = [jnp.sum(total, axis=1)[:, None] for total in sums]
    if gain_ref is None:
        return sums
    return [total * _root(squares, depth, eps)[None] for total in sums]


def _root(squares: Float[Array, "R I"], depth: int, eps: float | None) -> Float[Array, " R"]:
    """Return one over the root mean square of each row."""
    assert eps is not None
    return jax.lax.rsqrt(jnp.sum(squares, axis=1) / depth + eps)


def _weights(ref: Any, first: Array, outputs: int, at: Any) -> Float[Array, "O I"]:
    """Load weights of some outputs, with zeros for inputs that do not exist."""
    depth = ref.shape[1]
    if depth % at.size == 0:
        return ref[pl.ds(first, outputs), at]
    row = (first + jnp.arange(outputs, dtype=jnp.int32))[:, None]
    column = at.start + jnp.arange(at.size, dtype=jnp.int32)[None]
    inside = jnp.broadcast_to(column < depth, (outputs, at.size))
    return backend.load(ref.at[row, column], mask=inside, other=jnp.zeros((), ref.dtype))


def _gain(ref: Any, at: Any) -> Float[Array, " I"]:
    """Load the gains of some inputs, with zeros for those that do not exist."""
    if ref.shape[0] % at.size == 0:
        return ref[at]
    place = at.start + jnp.arange(at.size, dtype=jnp.int32)
    return backend.load(ref.at[place], mask=place < ref.shape[0], other=jnp.zeros((), ref.dtype))


def _rows(x_ref: Any, at: Any, padded: int, *, masked: bool = False) -> Float[Array, "R I"]:
    """Load some inputs of all rows, with zeros in padding rows and, if masked, for inputs that do not exist."""
    (rows, depth), size = x_ref.shape, at.size
    if rows == padded and not masked:
        return x_ref[:, at]
    row = jnp.arange(padded, dtype=jnp.int32)[:, None]
    column = at.start + jnp.arange(size, dtype=jnp.int32)[None]
    inside = jnp.broadcast_to((row < rows) & (column < depth) if masked else row < rows, (padded, size))
    return backend.load(x_ref.at[row, column], mask=inside, other=jnp.zeros((), x_ref.dtype))


def _places(ref: Any, first: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return the row, the column, and whether it exists, for outputs [O, R]."""
    rows, (count, padded) = ref.shape[0], shape
    row = jnp.arange(padded, dtype=jnp.int32)[None]
    column = (first + jnp.arange(count, dtype=jnp.int32))[:, None]
    return row, column, jnp.broadcast_to(row < rows, (count, padded))


def _read(ref: Any, first: Array, shape: tuple[int, ...]) -> Float[Array, "O R"]:
    row, column, inside = _places(ref, first, shape)
    return backend.load(ref.at[row, column], mask=inside, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)


def _write(ref: Any, first: Array, values: Float[Array, "O R"]) -> None:
    row, column, inside = _places(ref, first, values.shape)
    backend.store(ref.at[row, column], values.astype(ref.dtype), mask=inside)
