"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float, Int

from ..dispatch import Implementation, choose
from . import reference


def merge_clusters(
    kv: Float[Array, "B K S W"],
    pos: Int[Array, "B K S"],
    weight: Float[Array, "B K S"],
    target: Int[Array, "B K N A"],
    count: Int[Array, " B"],
    *,
    into: tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "B K S W"], Int[Array, "B K S"], Float[Array, "B K S"]]:
    """Tokens at even places of a chunk become part of tokens at odd places; what is left moves up, in order.

    A step of Chunked Soft Matching (Hu et al. 2025, section 5.2) once its edges are chosen. A token that others are merged into
    becomes the mean of all, each counted by its weight; its weight is then the sum of theirs, and its position that of the newest.

    Args:
        kv: keys, values or both, in N chunks of C places, S = N · C.
        pos: original positions.
        weight: how many tokens each stands for.
        target: for each of the A = ⌈C / 2⌉ even places of a chunk, what its token is merged into: 0 for place 1, 1 for place 3,
            and so on; -1 where it stays, or where there is none.
        count: tokens of each row, in its first places. The other places may hold anything.
        into: arrays to be written to in place, where they are not used again; what they hold is not read.
        implementation: "auto" takes the device's Pallas body where it serves; its work follows `count`, not S.
        interpret: run a Pallas body in its interpreter, on any device.

    Returns:
        `kv`, `pos` and `weight` of what is left, in each head's first places. The other places may hold anything.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(kv, target.shape[2])

    if choose("merge_clusters", implementation, gpu=gpu, interpret=interpret) == "xla":
        return reference.merge_clusters(kv, pos, weight, target, count)
    from . import gpu as body

    return body.merge_clusters(kv, pos, weight, target, count, into, interpret=interpret)
