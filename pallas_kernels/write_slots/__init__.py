"""A new entry in one slot a head, in several arrays of a cache at once."""

from .api import write_divided_slots as write_divided_slots
from .api import write_slots as write_slots
from .types import Writing as Writing
