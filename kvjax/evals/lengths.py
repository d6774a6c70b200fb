"""Filling synthetic examples to a length in tokens, for any tokenizer."""

from collections.abc import Callable

from .task import Example, Format


def largest(
    build: Callable[[int], Example], form: Format, length: int, min_units: int, max_units: int | None = None
) -> Example:
    """Return the example with the most units (sentences, words, documents) that fits `length` tokens with its answer.

    Args:
        build: returns the example of n units, deterministically.
        form: how examples become tokens.
        length: maximum tokens of the example with its answer.
        min_units: minimum units of an example.
        max_units: number of units that exist, None for no limit.

    Raises:
        ValueError: `min_units` units do not fit.
    """
    fits = build(min_units)
    if (need := form.count(fits)) > length:
        raise ValueError(
            f"length={length} is too small for the shortest example, which has {need} tokens. Give a larger length."
        )
    low, step = min_units, max(min_units, 1)
    while max_units is None or low < max_units:  # grow by doubling steps, then bisect the last step
        tried = low + step if max_units is None else min(low + step, max_units)
        example = build(tried)
        if form.count(example) > length:
            high = tried
            break
        fits, low, step = example, tried, 2 * step
    else:
        return fits
    while high - low > 1:
        middle = (low + high) // 2
        example = build(middle)
        if form.count(example) > length:
            high = middle
        else:
            fits, low = example, middle
    return fits
