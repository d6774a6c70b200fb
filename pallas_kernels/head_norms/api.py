"""Public function. Its `Op` picks the Triton kernel or XLA."""

from jaxtyping import Array, Float

from ..op import Implementation, Op
from ..projection import Norm

_OP = Op("head_norms", __name__, gpu=("pallas_triton",))


def head_norms(
    q: Float[Array, "*B N H"],
    k: Float[Array, "*B K H"],
    q_norm: Norm,
    k_norm: Norm,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    """RMS norms of query and key heads, as in Qwen3 and Gemma 3.

    Args:
        q, k: heads of queries and keys.
        q_norm, k_norm: norms of their channels.
        implementation: "auto" picks the GPU's Pallas kernel for the tokens of decoding steps, else XLA.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The normed queries and keys, in their types.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> q, k, norm = jnp.asarray([[[3.0, 4.0], [0.0, 2.0]]]), jnp.ones((1, 1, 2)), kvjax.pallas_kernels.Norm(jnp.ones(2), 0.0)
        >>> q, k = kvjax.pallas_kernels.head_norms(q, k, norm, norm)
        >>> [round(x, 3) for x in (q[0, 0] * 12.5**0.5).tolist()], k.tolist()
        ([3.0, 4.0], [[[1.0, 1.0]]])
    """
    return _OP(q, k, q_norm, k_norm, implementation=implementation, interpret=interpret)
