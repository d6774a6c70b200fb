"""Clustering of every head's keys, each head for itself."""

from .reference import Distance as Distance
from .reference import kmeans as kmeans
