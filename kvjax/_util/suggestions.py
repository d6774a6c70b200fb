"""What somebody may have meant: names are told apart by letters and digits alone, and of unknown ones the nearest is asked."""

import difflib
from collections.abc import Iterable


def letters(name: str) -> str:
    """What counts of a name: letters and digits, whatever their case."""
    return "".join(filter(str.isalnum, name.lower()))


def same(asked: str, known: Iterable[str]) -> str | None:
    """The known name that was asked for. Case, hyphens, underscores and spaces do not matter; any other letter does."""
    names = {letters(name): name for name in known}
    return names.get(letters(asked)) if all(letter.isalnum() or letter in " -_" for letter in asked) else None


def hint(asked: str, known: Iterable[str]) -> str:
    """A question to end a message with, such as " Did you mean 'treekv'?"; nothing where no known name is near."""
    names = {letters(name): name for name in known}
    near = difflib.get_close_matches(letters(asked), names, n=1)
    return f" Did you mean {names[near[0]]!r}?" if near else ""
