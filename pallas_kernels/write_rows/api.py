"""Public function. Its `Op` picks the Triton kernel or XLA."""

from jaxtyping import Array, Int, Shaped

from ..op import Implementation, Op

MANY_BYTES = 65536
"""Size of a row from which the kernel is faster than XLA."""


def _prefer_xla_reason(array: Array, rows: Array, values: Array) -> str | None:
    size = values[0].size * array.dtype.itemsize
    return f"a row has {size} bytes, fewer than {MANY_BYTES}" if size < MANY_BYTES else None


_OP = Op("write_rows", __name__, gpu=("pallas_triton",), prefer_xla_reason=_prefer_xla_reason)


def write_rows(
    array: Shaped[Array, "B ..."],
    rows: Int[Array, " R"],
    values: Shaped[Array, "R ..."],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Shaped[Array, "B ..."]:
    """Write whole rows of an array, in place if it is not used again.

    XLA's scatter writes element by element. The Pallas kernel copies at the memory's bandwidth.

    Args:
        array: the array.
        rows: indices of the rows to write, all different. Those outside the array are ignored.
        values: the rows, in the array's dtype.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case and rows are large, else XLA.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The array.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> array, values = jnp.zeros((3, 2)), jnp.ones((2, 2))
        >>> kvjax.pallas_kernels.write_rows(array, jnp.asarray([2, 5]), values)[:, 0].tolist()  # there is no row 5
        [0.0, 0.0, 1.0]
    """
    return _OP(array, rows, values, implementation=implementation, interpret=interpret)
