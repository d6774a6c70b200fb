"""Public function. Its `Op` picks the Triton kernels or XLA."""

from jaxtyping import Array, Float

from ..op import Implementation, Op

_OP = Op("delta_rule", __name__, gpu=("pallas_triton",))


def delta_rule(
    q: Float[Array, "B S G X"],
    k: Float[Array, "B S G X"],
    v: Float[Array, "B S M Y"],
    log_decay: Float[Array, "B S M"],
    rate: Float[Array, "B S M"],
    memory: Float[Array, "B M X Y"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "B S M Y"], Float[Array, "B M X Y"]]:
    """Update each head's matrix S with one token after the other, and read it (Yang et al. 2024, arXiv 2412.06464).

    With the key k, the value v, the query q, the decay e^g and the rate β of a token:

        S ← e^g · S
        S ← S + k (β · (v − Sᵀ k))ᵀ
        out = Sᵀ q

    Args:
        q, k: queries and keys in float32. Value head m has those of head m // (M / G).
        v: values. Their type is that of the products: float32, or at least TensorFloat-32 on a GPU.
        log_decay: g of each token, in float32. It is 0 for padding.
        rate: β of each token, in float32. It is 0 for padding.
        memory: the matrices before the first token, in float32.
        implementation: "auto" picks the GPU's Pallas kernels for 16-bit values, else XLA.
        interpret: run the Pallas kernels in interpret mode, on any device.

    Returns:
        The outputs in the type of `v`, and the matrices after the last token.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> one, zero = jnp.ones((1, 2, 1, 1)), jnp.zeros((1, 2, 1))  # two tokens, whose key, query and value are 1
        >>> out, memory = kvjax.pallas_kernels.delta_rule(one, one, one, zero, zero + 0.5, jnp.zeros((1, 1, 1, 1)))
        >>> out.ravel().tolist()  # each halves what is missing
        [0.5, 0.75]
    """
    return _OP(q, k, v, log_decay, rate, memory, implementation=implementation, interpret=interpret)
