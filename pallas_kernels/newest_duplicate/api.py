"""The public function, and the choice of who computes it."""

import jax
from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op

_OP = Op("newest_duplicate", __name__, gpu=("pallas_triton",))


def newest_duplicate(
    keys: Float[Array, "B K T H"],
    live: Bool[Array, "B K T"],
    threshold: float,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Int[Array, "B K T"]:
    """For each key the place of the last other one whose cosine with it is above a threshold; -1 where there is none.

    The token that R-KV does not charge for its duplicate (Cai et al. 2025, R-KV, section 3.3). A key of length 0 has a cosine of 0 with all.

    Args:
        keys: 0 where there is none.
        live: where there are keys; others are nobody's duplicate.
        threshold: cosine above which two keys are nearly duplicates.
        implementation: "auto" takes the GPU's Pallas kernel where it serves; it keeps no cosines in memory.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    keys = jax.lax.stop_gradient(keys)  # a place has no gradient
    return _OP(keys, live, threshold=threshold, implementation=implementation, interpret=interpret)
