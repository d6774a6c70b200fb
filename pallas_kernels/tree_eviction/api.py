"""The public function, and the choice of who computes it."""

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
    """One eviction in each head that keeps more than its row's budget (He et al. 2025, TreeKV, Algorithm 1, lines 9 to 16).

    In XLA a pass that finds the two, one that moves all later ranks, and one over the counters; in a GPU's Pallas kernel one.

    Args:
        score, steps: attention that tokens have received, and from how many queries.
        tree: tokens of the region that the scope goes around in, of each row.
        budget: tokens that are kept at most; above it, the ranks of both neighbours exist.
        sinks: tokens before that region.
        stride: how far the scope moves.
        scored: whether the one with the lower average goes, the older one on a tie (see `ties`); if not, the newer one always does.
        implementation: "auto" takes the GPU's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    given, options = (ranked, score, steps, tree, budget), {"sinks": sinks, "stride": stride, "scored": scored}
    return Ranked(*_OP(*given, **options, implementation=implementation, interpret=interpret))
