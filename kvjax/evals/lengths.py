"""Synthetic examples of a requested length, measured with any tokenizer."""

from collections.abc import Callable

from .task import Example, Format


def largest(
    build: Callable[[int], Example], form: Format, length: int, min_units: int, max_units: int | None = None
) -> Example:
    """The example with the most units (sentences, words, documents) that fits in `length` tokens with its answer.

    Args:
        build: the example with n units; deterministic.
        min_units: minimum number of units.
        max_units: number of units available; None for no limit.

    Raises:
        ValueError: the example with `min_units` units does not fit.
    """
    fits = build(min_units)
    if (need := form.count(fits)) > length:
        raise ValueError(f"{length} tokens cannot hold the shortest example, which takes {need}; give a larger length")
    low, step = min_units, max(min_units, 1)
    while max_units is None or low < max_units:  # double the step until an example is too long, then bisect
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
