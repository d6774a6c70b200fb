"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op
from .types import Always

_OP = Op("cluster_tokens", __name__, gpu=("pallas_triton",))


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    always: Always | None = None,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
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
        always: tokens that are taken besides, for which the result has P places instead of S.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        Tokens, and which are meant: in the first S places those of clusters before any that are not. All are tokens of `order`, or
        positions below C.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    given = scores, sizes, starts, order, room, size, always
    return _OP(*given, implementation=implementation, interpret=interpret)
