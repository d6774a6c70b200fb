"""Attention of one new query a row over the slots of a compressed cache."""

from .api import decode_attention as decode_attention
from .result import Attended as Attended
from .result import Rotation as Rotation
