"""The most similar keys of every chunk, without a score for each pair in memory."""

from .api import chunk_similarity as chunk_similarity
from .reference import RESOLUTION as RESOLUTION
