"""Operations with hand-written GPU and TPU kernels, used by the cache layers, the policies and the models.

Every operation also has an XLA reference. There is one folder per group of operations:

- `api.py` has the public functions. Each has an `Op` (see `op.py`), which picks a kernel or XLA.
- `reference.py` has the XLA reference.
- `types.py` has the operations' own types, if there are any.
- `pallas_triton.py`, `pallas_mosaic_gpu.py` and `pallas_mosaic_tpu.py` have the kernels, by Pallas backend. In a folder
  with several kernels per backend these are named `<operation>_<backend>.py`, such as `nearest_pallas_triton.py`.
- `hopper/` has the kernels that only Hopper GPUs run.

The docstring of each folder names the replacement for its Triton kernels, which JAX has deprecated.
"""

from .block_scores import centroid_scores as centroid_scores
from .block_scores import page_scores as page_scores
from .block_scores import widen_bounds as widen_bounds
from .cluster_merging import Clusters as Clusters
from .cluster_merging import chunk_similarity as chunk_similarity
from .cluster_merging import copy_clusters as copy_clusters
from .cluster_merging import merge_clusters as merge_clusters
from .decode_attention import Attended as Attended
from .decode_attention import CacheShard as CacheShard
from .decode_attention import Factors as Factors
from .decode_attention import Packed as Packed
from .decode_attention import PackedSlots as PackedSlots
from .decode_attention import Rotation as Rotation
from .decode_attention import decode_attention as decode_attention
from .decode_attention import packed_and_latest as packed_and_latest
from .decode_attention import packed_decode_attention as packed_decode_attention
from .decode_attention import partial_packed_attention as partial_packed_attention
from .decode_attention import partial_ragged_attention as partial_ragged_attention
from .decode_attention import ragged_attention as ragged_attention
from .decode_attention import sharded_decode_attention as sharded_decode_attention
from .delta_rule import delta_rule as delta_rule
from .experts import best_experts as best_experts
from .experts import expert_mlp as expert_mlp
from .float8 import Float8Codes as Float8Codes
from .float8 import Float8Factor as Float8Factor
from .gather_attention import fetch_slots as fetch_slots
from .gather_attention import gather_attention as gather_attention
from .gather_attention import reads_host_memory as reads_host_memory
from .head_norms import head_norms as head_norms
from .hopper.fused_decode_block import BlockWeights as BlockWeights
from .hopper.fused_decode_block import fused_decode_block as fused_decode_block
from .index_sums import index_sums as index_sums
from .kmeans import Distance as Distance
from .kmeans import Nearest as Nearest
from .kmeans import kmeans as kmeans
from .kmeans import nearest as nearest
from .kmeans import newest_duplicate as newest_duplicate
from .prefill_attention import Run as Run
from .prefill_attention import Stripes as Stripes
from .prefill_attention import block_attention as block_attention
from .prefill_attention import partial_block_attention as partial_block_attention
from .prefill_attention import prefill_attention as prefill_attention
from .projection import GroupedMatrix as GroupedMatrix
from .projection import Int8Matrix as Int8Matrix
from .projection import Matrix as Matrix
from .projection import Norm as Norm
from .projection import QuantizedMatrix as QuantizedMatrix
from .projection import gated_projection as gated_projection
from .projection import is_quantized as is_quantized
from .projection import lookup as lookup
from .projection import projection as projection
from .rotary import DeferredRope as DeferredRope
from .rotary import heads_of as heads_of
from .ties import exceeds as exceeds
from .top_k import Always as Always
from .top_k import cluster_tokens as cluster_tokens
from .top_k import top_k as top_k
from .top_k import top_k_indices as top_k_indices
from .tree_eviction import Ranked as Ranked
from .tree_eviction import tree_eviction as tree_eviction
from .window_scores import attention_mass as attention_mass
from .window_scores import window_scores as window_scores
from .write_rows import write_rows as write_rows
from .write_slots import SlotUpdate as SlotUpdate
from .write_slots import write_sharded_slots as write_sharded_slots
from .write_slots import write_slots as write_slots
from .write_slots import writes_host_memory as writes_host_memory
