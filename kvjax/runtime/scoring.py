"""Log-probabilities of given tokens through a policy's cache, with derivatives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime import decoding
from kvjax.runtime.reading import read_prompts


def following_logits(
    policy: Policy,
    specs: Sequence[LayerSpec],
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    following: Int[Array, "B M"],
) -> Float[Array, "B M V"]:
    """Logits from which each of the following tokens would be sampled, teacher-forced through the cache.

    Prefill compresses the prompt, and each following token is a decode step. Steps are rematerialised in the backward
    pass (`jax.checkpoint`), so that only the caches between steps are stored.

    Args:
        policy, specs: the policy and each layer's description.
        params: the model.
        tokens, lengths: right-padded prompts.
        following: tokens after the prompts.
    """
    total = lengths + following.shape[1]
    logits, caches = read_prompts(policy, specs, params, tokens, lengths, total)

    @jax.checkpoint  # pyright: ignore[reportUntypedFunctionDecorator]
    def step(params: Params, caches: Any, token: Array, pos: Array) -> tuple[Array, Any]:
        return decoding.step(policy, tuple(specs), params, caches, token, pos)

    def one(held: tuple[Array, Any, Array], token: Array) -> tuple[tuple[Array, Any, Array], Array]:
        logits, caches, pos = held
        after, caches = step(params, caches, token, pos)
        return (after, caches, pos + 1), logits

    # The last token's own step would give logits that no token needs.
    (last, *_), others = jax.lax.scan(one, (logits, caches, lengths), following[:, :-1].T)
    return jnp.concatenate([jnp.moveaxis(others, 0, 1), last[:, None]], axis=1)
