"""Making synthetic examples as long as asked for, by whatever tokenizer."""

from collections.abc import Callable

from .task import Example, Format


def largest(build: Callable[[int], Example], form: Format, length: int, least: int, most: int | None = None) -> Example:
    """The example of the most units (sentences, words, documents) that fits `length` tokens with its answer.

    Args:
        build: the example of n units; of the same n always the same.
        least: units without which there is no example.
        most: units that there are; None if they never run out.

    Raises:
        ValueError: not even `least` units fit.
    """
    fits = build(least)
    if (need := form.count(fits)) > length:
        raise ValueError(f"{length} tokens cannot hold the shortest example, which takes {need}; give a larger length")
    low, step = least, max(least, 1)
    while most is None or low < most:  # grow by doubling steps, then halve the step that was too much
        tried = low + step if most is None else min(low + step, most)
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
