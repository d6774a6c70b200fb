"""Making synthetic examples as long as asked for, by whatever tokenizer."""

from collections.abc import Callable

from .task import Example, Format


def largest(
    build: Callable[[int], Example], form: Format, length: int, min_units: int, max_units: int | None = None
) -> Example:
    """The example of the most units (sentences, words, documents) that fits `length` tokens with its answer.

    Args:
        build: the example of n units; of the same n always the same.
        min_units: units without which there is no example.
        max_units: units that there are; None if they never run out.

    Raises:
        ValueError: not even `min_units` units fit.
    """
    fits = build(min_units)
    if (need := form.count(fits)) > length:
        raise ValueError(f"{length} tokens cannot hold the shortest example, which takes {need}; give a larger length")
    low, step = min_units, max(min_units, 1)
    while max_units is None or low < max_units:  # grow by doubling steps, then halve the step that was too much
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
