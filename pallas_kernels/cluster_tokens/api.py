"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Bool, Float, Int

from ..dispatch import Implementation, choose
from . import reference


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "B K G S"], Bool[Array, "B K G S"]]:
    """The tokens of whole clusters, the highest score first, until there is room for no more (ClusterKV, section IV-C).

    The cluster for which not all room is left gives its first tokens in `order`. Of equal scores the first cluster comes first; NaN is
    lower than all. All implementations choose the same tokens, each in an order of its own.

    Args:
        scores: of each cluster, for each of the G queries that share a KV head's clusters.
        sizes: tokens of a cluster; 0 where there is no cluster.
        starts: where a cluster's tokens begin in `order`.
        order: tokens, those of one cluster next to each other.
        room: the most tokens to choose in a row of the batch, up to `size`.
        size: S, places for them.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`. There is no body for TPUs.
        interpret: run a Pallas body in its interpreter, on any device.

    Returns:
        Tokens, those that are meant first, and which are meant. All are tokens of `order`.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    chosen = choose("cluster_tokens", implementation, gpu=lambda: _refuses(scores.shape[-1]), interpret=interpret)
    if chosen == "xla":
        return reference.cluster_tokens(scores, sizes, starts, order, room, size)
    from . import gpu

    return gpu.cluster_tokens(scores, sizes, starts, order, room, size, interpret=interpret)


def _refuses(clusters: int) -> str | None:
    from . import gpu

    return gpu.refuses(clusters)
