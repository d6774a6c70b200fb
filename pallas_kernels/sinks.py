"""Attention sinks: a logit of each query head that takes a share of every softmax and has no value (gpt-oss).

The sink scales what attention returns, so that it can be added after any kernel that returns the log-sum-exp of its logits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def with_sinks(
    out: Float[Array, "*S H"], logsumexp: Float[Array, "*S"], sinks: Float[Array, "..."] | None
) -> Float[Array, "*S H"]:
    """Attention output with a sink in the denominator of every softmax.

    Args:
        out: attended values without sinks.
        logsumexp: log-sum-exp of the logits without sinks.
        sinks: logits of the query heads' sinks, broadcast to `logsumexp`; None to return `out` as it is.
    """
    if sinks is None:
        return out
    share = jax.nn.sigmoid(logsumexp - jnp.broadcast_to(sinks.astype(jnp.float32), logsumexp.shape))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


def softmax_with_sinks(
    logits: Float[Array, "*S T"], sinks: Float[Array, "..."] | None, where: Bool[Array, "*#S #T"] | None = None
) -> Float[Array, "*S T"]:
    """Softmax over the last axis, with a sink in the denominator if `sinks` are given.

    Args:
        logits: logits.
        sinks: logits of the sinks, broadcast to those of one key.
        where: logits that are used; others have a probability of 0.
    """
    shares = jax.nn.softmax(logits, axis=-1, where=where)
    if sinks is None:
        return shares
    total = jax.nn.logsumexp(logits, axis=-1, where=where)
    share = jax.nn.sigmoid(total - jnp.broadcast_to(sinks.astype(jnp.float32), total.shape))
    return shares * share[..., None]
