"""Text that cannot be passed on yet, as a tag may begin in it."""


def begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which `tag` begins, less than all of it."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
