"""The public function, and the choice of who computes it."""

from collections.abc import Sequence

from jaxtyping import Array, Int

from ..dispatch import Implementation, choose
from ..rotary import Turned
from . import reference


def write_slots(
    arrays: Sequence[Array],
    slot: Int[Array, "B K"],
    values: Sequence[Array | Turned | int | float],
    counters: Sequence[Array] = (),
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Array]:
    """Arrays with a new value in one slot a row and KV head, in place where the arrays are not used again.

    A scatter an array is a kernel each in XLA, of which the launch takes longer than the writing; a Pallas body writes all at once.

    Args:
        arrays: [B, K, C] or [B, K, C, H] each, all of the same B, K and C.
        slot: which, at least 0; where it is C or more, nothing is written.
        values: for each array [B, K] or [B, K, H], or anything that broadcasts to that; `Turned` to be rotated before it is written.
        counters: integers [B, K] or [B], to be made greater by one; `slot` may be among them.
        implementation: "auto" takes the device's Pallas body where it serves.
        interpret: run a Pallas body in its interpreter, on any device.

    Returns:
        The arrays, and after them the counters.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(arrays)

    if choose("write_slots", implementation, gpu=gpu, interpret=interpret) == "xla":
        return reference.write_slots(arrays, slot, values, counters)
    from . import gpu as body

    return body.write_slots(arrays, slot, values, counters, interpret=interpret)
