"""Pages: a cache divided into runs of neighbouring slots, each with a statistic of its keys that a query can judge it by."""

import einops
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import prompt_mask
from kvjax.pallas_kernels import top_k_indices


def paged(
    keys: Float[Array, "B T K H"], lengths: Int[Array, " B"], page: int, pages: int
) -> tuple[Float[Array, "B K P page H"], Bool[Array, "B 1 P page 1"]]:
    """A right-padded prompt's keys in `pages` pages of `page` tokens, and which of these are tokens of the prompt.

    Args:
        lengths: tokens in each row.
        pages: how many, at least as many as there are keys for.
    """
    padded = jnp.pad(keys, [(0, 0), (0, pages * page - keys.shape[1]), (0, 0), (0, 0)])
    inside = prompt_mask(lengths, pages * page)
    return (
        einops.rearrange(padded, "b (p s) k h -> b k p s h", s=page),
        einops.rearrange(inside, "b (p s) -> b 1 p s 1", s=page),
    )


def best_pages(
    scores: Float[Array, "B R P"], candidates: Bool[Array, "B R P"], count: Int[Array, " B"], size: int
) -> tuple[Int[Array, "B R M"], Bool[Array, "B R M"]]:
    """The pages that score highest, of equal ones the first, and which of them are valid.

    Args:
        candidates: pages that may be taken.
        count: how many of each row are, at most.
        size: M, no less than any count, and no more than there are pages.
    """
    return top_k_indices(jnp.where(candidates, scores, -jnp.inf), count[:, None], size)


def slots_of(
    index: Int[Array, "B R M"], valid: Bool[Array, "B R M"], page: int
) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
    """The slots of pages, `page` for each in order, and which of them are valid."""
    slots = index[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    return slots.reshape(*index.shape[:2], -1), jnp.repeat(valid, page, axis=-1)
