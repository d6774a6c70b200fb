"""A new entry in one slot a head, in several arrays of a cache at once."""

from .api import Writing as Writing
from .api import write_divided_slots as write_divided_slots
from .api import write_slots as write_slots
