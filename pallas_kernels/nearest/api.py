"""The public function, and the choice of who computes it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import Implementation, choose
from . import reference
from .result import Nearest


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Nearest:
    """For each query the key with the largest inner product plus bias, of equally good ones (see `ties`) the first.

    With the bias -|key|²/2 that is the key at the least Euclidean distance. Products are accumulated in float32, and of
    float32 operands exact to it.

    Args:
        queries, keys: of one dtype.
        bias: added to every score of a key, in float32. -inf forbids a key, whose contents, NaN included, then do not matter.
        implementation: "auto" takes the device's Pallas body where it serves; it keeps no scores in memory.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(queries, keys)

    def tpu() -> str | None:
        from . import tpu

        return tpu.refuses(queries, keys)

    def slower() -> str | None:
        few = keys.dtype == jnp.float32 and keys.shape[-2] <= 64
        return "few float32 keys are as fast in XLA" if few else None

    chosen = choose("nearest", implementation, tpu=tpu, gpu=gpu, slower=slower, interpret=interpret)
    if chosen == "xla":
        return reference.nearest(queries, keys, bias)
    if chosen == "gpu":
        from .gpu import nearest as body
    else:
        from .tpu import nearest as body
    return body(queries, keys, bias, interpret=interpret)
