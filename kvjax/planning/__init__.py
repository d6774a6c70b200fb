"""Plans which models, policies and contexts fit which devices and how fast they run, without weights or devices."""

from .plan import Plan as Plan
from .plan import plan as plan
