"""Attention of one new query per row over slots that each head selects from a large cache.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later for pages, which its copy engine brings whole;
XLA's gather for single slots and elsewhere.
"""

from .api import gather_attention as gather_attention
