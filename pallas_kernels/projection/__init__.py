"""Matrix products of a decoding step's few rows, with what comes before and after them."""

from .api import gated_projection as gated_projection
from .api import projection as projection
from .types import Norm as Norm
