"""The highest scores of every row, as a mask or as places."""

from .api import top_k as top_k
from .api import top_k_indices as top_k_indices
