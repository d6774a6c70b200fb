"""Measuring what a policy costs in quality."""

from .perplexity import Perplexity as Perplexity
from .perplexity import streaming as streaming
from .perplexity import windowed as windowed
