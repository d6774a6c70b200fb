"""The tokens of a query's best clusters."""

from .api import cluster_tokens as cluster_tokens
from .types import Always as Always
