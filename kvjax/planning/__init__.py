"""What fits which devices, and how fast it may be, before there are weights or devices."""

from .plan import Plan as Plan
from .plan import plan as plan
