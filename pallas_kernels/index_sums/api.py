"""Public function. Its `Op` picks the Triton kernel or XLA."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op

MOST = 4096
"""Maximum number of values per head that the kernel, which compares all pairs, sums faster than XLA."""


def _prefer_xla_reason(index: Array, values: Array) -> str | None:
    return f"{values.shape[-1]} values are more than {MOST}" if values.shape[-1] > MOST else None


_OP = Op("index_sums", __name__, gpu=("pallas_triton",), prefer_xla_reason=_prefer_xla_reason)


def index_sums(
    index: Int[Array, "B K T"],
    values: Float[Array, "B K T"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K T"]:
    """Sum values by index, separately for each sequence and head.

    Results do not vary from call to call, unlike those of a scatter on a GPU, which adds in arbitrary order.

    Args:
        index: where each value is added, 0 to T - 1. Values with a negative index are ignored.
        values: the values.
        implementation: "auto" picks the GPU's Pallas kernel for few values, else XLA.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The sums, in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> index, values = jnp.asarray([[[0, 2, 0, -1]]]), jnp.asarray([[[1.0, 2.0, 3.0, 9.0]]])
        >>> kvjax.pallas_kernels.index_sums(index, values).ravel().tolist()
        [4.0, 0.0, 2.0, 0.0]
    """
    return _OP(index, values, implementation=implementation, interpret=interpret)
