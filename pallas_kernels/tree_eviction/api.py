"""Public function. Its `Op` picks the Triton kernel or XLA."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from .types import Ranked

_OP = Op("tree_eviction", __name__, gpu=("pallas_triton",))


def tree_eviction(
    ranked: Ranked,
    score: Float[Array, "B K C"],
    steps: Float[Array, "B K C"],
    tree: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    sinks: int,
    stride: int,
    scored: bool,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Ranked:
    """Evict one token in each head that exceeds its budget (He et al. 2025, TreeKV, Algorithm 1, lines 9 to 16).

    The GPU kernel does this in one pass. XLA uses three: one finds the two neighbours, one changes all later ranks, and
    one updates the counters.

    Args:
        ranked: the state that an eviction changes.
        score, steps: attention mass that each token has received, and the number of queries that it sums over.
        tree: number of tokens of the region that the scope cycles through, per sequence.
        budget: maximum number of kept tokens. If it is exceeded, the ranks of both neighbours exist.
        sinks: number of tokens before that region.
        stride: how far the scope advances.
        scored: if True, evict the token with the lower average attention, and the older one on a tie (see `ties`). If
            False, always evict the newer one.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The new state.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> places, kept, scope = jnp.arange(4)[None, None], jnp.asarray([[4]]), jnp.asarray([[0]])
        >>> ranked = kvjax.pallas_kernels.Ranked(places, places, jnp.ones((1, 1, 4)), kept, kept, scope)
        >>> score, steps = jnp.asarray([[[9.0, 1, 2, 9]]]), jnp.ones((1, 1, 4))
        >>> tree, budget = jnp.asarray([2]), jnp.asarray([3])
        >>> options = {"sinks": 1, "stride": 1, "scored": True}
        >>> ranked = kvjax.pallas_kernels.tree_eviction(ranked, score, steps, tree, budget, **options)
        >>> ranked.pos.ravel().tolist()  # token 1 received less attention than token 2
        [0, -1, 2, 3]
    """
    given, options = (ranked, score, steps, tree, budget), {"sinks": sinks, "stride": stride, "scored": scored}
    return Ranked(*_OP(*given, **options, implementation=implementation, interpret=interpret))
