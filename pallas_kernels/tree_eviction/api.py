"""The public function, and the choice of who computes it."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from ..dispatch import Implementation, choose
from . import reference


class Ranked(NamedTuple):
    """What an eviction changes of a cache.

    Attributes:
        rank: place of a slot's token among those kept, 0 for the oldest; C where free.
        pos, weight: of the token in a slot, -1 and 0 where free.
        kept: how many tokens are, each rank below it once.
        next: the slot that the next token goes to.
        scope: rank of the older of the two neighbours, less the sinks.
    """

    rank: Int[Array, "B K C"]
    pos: Int[Array, "B K C"]
    weight: Float[Array, "B K C"]
    kept: Int[Array, "B K"]
    next: Int[Array, "B K"]
    scope: Int[Array, "B K"]


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

    In XLA a pass that finds the two, one that moves all later ranks, and one over the counters; in a GPU's Pallas body one.

    Args:
        score, steps: attention that tokens have received, and from how many queries.
        tree: tokens of the region that the scope goes around in, of each row.
        budget: tokens that are kept at most; above it, the ranks of both neighbours exist.
        sinks: tokens before that region.
        stride: how far the scope moves.
        scored: whether the one with the lower average goes, the older one on a tie (see `ties`); if not, the newer one always does.
        implementation: "auto" takes the GPU's Pallas body where it serves.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses()

    given = ranked, score, steps, tree, budget
    if choose("tree_eviction", implementation, gpu=gpu, interpret=interpret) == "xla":
        return Ranked(*reference.tree_eviction(*given, sinks=sinks, stride=stride, scored=scored))
    from . import gpu as body

    return Ranked(*body.tree_eviction(*given, sinks=sinks, stride=stride, scored=scored, interpret=interpret))
