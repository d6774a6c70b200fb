"""The words that RULER draws: those of the `wonderwords` package."""

from functools import cache

from kvjax._util.extras import optional


@cache
def category(name: str) -> tuple[str, ...]:
    """All words of one kind ("noun", "adjective" or "verb"), sorted."""
    words = optional("wonderwords", "RULER's vocabulary")
    return tuple(sorted(set(words.RandomWord().filter(include_categories=[name]))))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted."""
    return tuple(sorted({word for name in ("noun", "adjective", "verb") for word in category(name)}))
