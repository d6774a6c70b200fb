"""Clustering of every head's keys, each head for itself."""

from .api import kmeans as kmeans
from .lloyd import Distance as Distance
