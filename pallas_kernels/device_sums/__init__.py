"""What all devices that run one model have, added up or side by side: small arrays, of which a collective's latency is what counts."""

from .api import device_gather as device_gather
from .api import device_sum as device_sum
