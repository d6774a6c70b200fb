"""The mask of the slots of selected pages. The reference and the kernels of `gather_attention` use it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def live_slots(
    index: Int[Array, "B R P"], live: Bool[Array, "B R L"], page: int, tokens: Int[Array, " B"] | None
) -> Bool[Array, "B R S"]:
    """Return the mask of the slots of the selected pages, in order. Arguments are as for the public function."""
    if live.shape != (*index.shape[:2], index.shape[2] * page):
        live = jnp.repeat(live, page, axis=-1)
    if tokens is None:
        return live
    slots = index[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    return live & (slots.reshape(live.shape) < tokens[:, None, None])
