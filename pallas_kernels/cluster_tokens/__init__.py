"""The tokens of a query's best clusters."""

from .api import Always as Always
from .api import cluster_tokens as cluster_tokens
