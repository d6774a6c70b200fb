"""The full cache: every token, as a plain transformer keeps it. The yardstick of all others."""

import dataclasses
from typing import ClassVar

from .base import Policy
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keep everything."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "Vaswani et al. 2017, Attention Is All You Need"
    keeps: ClassVar[str] = "every token"
