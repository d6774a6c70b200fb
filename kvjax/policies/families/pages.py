"""Pages: runs of neighbouring cache slots, each with a statistic of its keys by which a query ranks it."""

import einops
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import prompt_mask
from kvjax.pallas_kernels import top_k_indices


def paged(
    keys: Float[Array, "B T K H"], lengths: Int[Array, " B"], page: int, pages: int
) -> tuple[Float[Array, "B K P page H"], Bool[Array, "B 1 P page 1"]]:
    """Divide a right-padded prompt's keys into `pages` pages of `page` tokens.

    Args:
        keys: keys of the prompt.
        lengths: tokens in each row.
        page: tokens of a page.
        pages: number of pages, enough for all keys.

    Returns:
        The keys by page, and which of them are tokens of the prompt.
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
    """Return the pages with the highest scores, and which of them are valid. Ties go to the first.

    Args:
        scores: score of each page.
        candidates: pages that may be selected.
        count: maximum number of pages of each row.
        size: M, at least every count and at most the number of pages.
    """
    return top_k_indices(jnp.where(candidates, scores, -jnp.inf), count[:, None], size)


def slots_of(
    index: Int[Array, "B R M"], valid: Bool[Array, "B R M"], page: int
) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
    """Return the slots of pages, `page` for each in order, and which of them are valid."""
    slots = index[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    return slots.reshape(*index.shape[:2], -1), jnp.repeat(valid, page, axis=-1)
