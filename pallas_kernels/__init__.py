"""Attention operations the cache policies are built on: one folder an operation, a readable XLA reference first."""

from .between_attentions import Between as Between
from .between_attentions import between_attentions as between_attentions
from .chunk_similarity import chunk_similarity as chunk_similarity
from .cluster_tokens import cluster_tokens as cluster_tokens
from .decode_attention import Attended as Attended
from .decode_attention import Rotation as Rotation
from .decode_attention import decode_attention as decode_attention
from .gather_attention import gather_attention as gather_attention
from .kmeans import Distance as Distance
from .kmeans import kmeans as kmeans
from .merge_clusters import merge_clusters as merge_clusters
from .nearest import Nearest as Nearest
from .nearest import nearest as nearest
from .page_scores import page_scores as page_scores
from .prefill_attention import prefill_attention as prefill_attention
from .projection import Norm as Norm
from .projection import gated_projection as gated_projection
from .projection import projection as projection
from .ragged_attention import ragged_attention as ragged_attention
from .rotary import Turned as Turned
from .top_k import top_k as top_k
from .top_k import top_k_indices as top_k_indices
from .window_scores import window_scores as window_scores
from .write_slots import write_slots as write_slots
