"""The public function, and the choice of who computes it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..op import Implementation, Op
from .types import Nearest


def _prefer_xla_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    few = keys.dtype == jnp.float32 and keys.shape[-2] <= 64
    return "few float32 keys are as fast in XLA" if few else None


_OP = Op(
    "nearest",
    __name__,
    gpu=("pallas_mosaic_gpu", "pallas_triton"),
    tpu=("pallas_mosaic_tpu",),
    prefer_xla_reason=_prefer_xla_reason,
)


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Nearest:
    """For each query the key with the largest inner product plus bias, of equally good ones the first.

    With the bias -|key|²/2 that is the key at the least Euclidean distance. Products are accumulated in float32, and of
    float32 operands exact to it. In XLA, whose sums depend on the size of the batch, scores within rounding are equally good (see
    `ties`); kernels, whose sums do not, compare them as they are.

    Args:
        queries, keys: of one dtype.
        bias: added to every score of a key, in float32. -inf forbids a key, whose contents, NaN included, then do not matter.
        implementation: "auto" takes the device's Pallas kernel where it serves; it keeps no scores in memory.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _OP(queries, keys, bias, implementation=implementation, interpret=interpret)
