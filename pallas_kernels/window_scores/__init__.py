"""How much the last queries of a prompt attend to each of its tokens."""

from .api import window_scores as window_scores
