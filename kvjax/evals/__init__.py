"""Measuring what a policy costs in quality."""

from .continuation import Continuation as Continuation
from .continuation import continuation as continuation
from .perplexity import Perplexity as Perplexity
from .perplexity import streaming as streaming
from .perplexity import windowed as windowed
