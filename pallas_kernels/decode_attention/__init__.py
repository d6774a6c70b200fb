"""Attention of one new query a row over the slots of a compressed cache."""

from .api import decode_attention as decode_attention
from .types import Attended as Attended
from .types import Rotation as Rotation
