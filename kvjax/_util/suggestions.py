"""Matches names by letters and digits only, and suggests the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable


def letters(name: str) -> str:
    """Letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.lower()))


def same(asked: str, known: Iterable[str]) -> str | None:
    """Known name that matches, ignoring case, hyphens, underscores and spaces; None if there is none."""
    names = {letters(name): name for name in known}
    return names.get(letters(asked)) if all(letter.isalnum() or letter in " -_" for letter in asked) else None


def hint(asked: str, known: Iterable[str]) -> str:
    """Suggestion to append to an error, such as " Did you mean 'treekv'?"; empty if no known name is near."""
    names = {letters(name): name for name in known}
    near = difflib.get_close_matches(letters(asked), names, n=1)
    return f" Did you mean {names[near[0]]!r}?" if near else ""
