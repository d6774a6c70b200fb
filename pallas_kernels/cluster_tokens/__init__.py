"""The tokens of the clusters that a query likes best, up to a number of them."""

from .api import cluster_tokens as cluster_tokens
