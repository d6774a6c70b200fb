"""From one layer's attention to the next one's queries, keys and values."""

from .api import between_attentions as between_attentions
from .types import Between as Between
from .types import Moved as Moved
