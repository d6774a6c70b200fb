"""Triton kernel of `head_norms`, one program per head of a token.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

XLA computes each norm in a kernel of its own. In a decoding step of few rows, a kernel takes longer to launch than to
run.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..projection import Norm
from ..triton import triton_call, triton_unsupported

MOST = 1024
"""Maximum number of tokens, above which launches take little of the time."""


def unsupported_reason(q: Array, k: Array, q_norm: Norm, k_norm: Norm) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    tokens = math.prod(q.shape[:-2])
    if tokens > MOST:
        return f"{tokens} tokens are more than {MOST}"
    if (q_norm.eps, q_norm.offset) != (k_norm.eps, k_norm.offset):
        return "the norms of queries and keys differ"
    return triton_unsupported(dim=q.shape[-1])


def head_norms(
    q: Float[Array, "*B N H"], k: Float[Array, "*B K H"], q_norm: Norm, k_norm: Norm, *, interpret: bool = False
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    """Norm each head; see the public function."""
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    options = {"eps": q_norm.eps, "offset": q_norm.offset, "interpret": interpret}
    normed = _call(*flat, q_norm.gain, k_norm.gain, **options)
    return normed[0].reshape(q.shape), normed[1].reshape(k.shape)


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def _call(
    q: Array, k: Array, q_gain: Array, k_gain: Array, *, eps: float, offset: float | None, interpret: bool
) -> tuple[Array, Array]:
    """Call the kernel. It is traced and lowered once for all layers of one shape."""
    q_normed, k_normed = triton_call(
        functools.partial(_body, eps=eps, offset=offset),
        grid=(len(q), q.shape[1] + k.shape[1]),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        warps=1,
        interpret=interpret,
        name="head_norms",
    )(q, k, q_gain, k_gain)
    return q_normed, k_normed


def _body(
    q_ref: Any,
    k_ref: Any,
    q_gain_ref: Any,
    k_gain_ref: Any,
    q_out_ref: Any,
    k_out_ref: Any,
    *,
    eps: float,
    offset: float | None,
) -> None:
    token, head = pl.program_id(0), pl.program_id(1)
    queries = q_ref.shape[1]

    def norm(ref: Any, gain_ref: Any, out_ref: Any, at: Any) -> None:
        out_ref[token, at] = Norm(gain_ref[...], eps, offset)(ref[token, at])

    pl.when(head < queries)(lambda: norm(q_ref, q_gain_ref, q_out_ref, head))
    pl.when(head >= queries)(lambda: norm(k_ref, k_gain_ref, k_out_ref, head - queries))
