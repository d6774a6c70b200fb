"""The key most like a query, among very many, without a score for each pair in memory."""

from .api import nearest as nearest
from .types import Nearest as Nearest
