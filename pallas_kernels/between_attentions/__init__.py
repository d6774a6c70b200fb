"""From one layer's attention to the next one's queries, keys and values."""

from .api import Between as Between
from .api import Moved as Moved
from .api import between_attentions as between_attentions
