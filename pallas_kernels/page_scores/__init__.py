"""The most that a query can have as product with any key of a page, from the bounds of the keys in it."""

from .api import page_scores as page_scores
