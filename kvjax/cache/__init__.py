"""The cache state: a pytree of fixed shape, and the few functions that policies are written with.

A cache has C slots for every row and KV head. Its capacity is a shape, never a mask over the whole context, so dropped
tokens occupy no memory. Slots are filled from the left. When a token is evicted, the next token takes its slot, so keys
and values never move while decoding.
"""

from .attention import attend as attend
from .attention import attend_block as attend_block
from .attention import attend_packed as attend_packed
from .attention import attend_prompt as attend_prompt
from .attention import attend_selected as attend_selected
from .attention import attend_split as attend_split
from .blocks import as_prompt_with_block as as_prompt_with_block
from .blocks import keep_places as keep_places
from .blocks import kept_as_prompt as kept_as_prompt
from .blocks import where_rows as where_rows
from .blocks import with_places as with_places
from .order import stable_order as stable_order
from .recurrent import RecurrentState as RecurrentState
from .recurrent import empty_recurrent as empty_recurrent
from .shard import Shard as Shard
from .sharded import RUN as RUN
from .sharded import gathered as gathered
from .sharded import global_order as global_order
from .sharded import keys_at as keys_at
from .sharded import local_part as local_part
from .sharded import local_slot as local_slot
from .sharded import local_slots as local_slots
from .sharded import merged as merged
from .sharded import rows_at as rows_at
from .sharded import shard_order as shard_order
from .sharded import shard_slots as shard_slots
from .sharded import sharded_empty as sharded_empty
from .sharded import slots_of_leaves as slots_of_leaves
from .sharded import stripes as stripes
from .spec import LayerSpec as LayerSpec
from .spec import bucket as bucket
from .spec import layer_specs as layer_specs
from .spec import round_slots as round_slots
from .spec import row_buckets as row_buckets
from .state import LayerCache as LayerCache
from .state import compact_indices as compact_indices
from .state import empty as empty
from .state import extended as extended
from .state import from_prompt as from_prompt
from .state import keep as keep
from .state import map_kv as map_kv
from .tokens import PromptKV as PromptKV
from .tokens import Rotated as Rotated
from .tokens import Token as Token
from .tokens import TokenBlock as TokenBlock
from .tokens import positions_from as positions_from
from .tokens import prompt_mask as prompt_mask
from .update import evict as evict
from .update import insert as insert
from .update import insert_block as insert_block
from .update import insert_split as insert_split
from .update import keep_slots as keep_slots
from .update import seek_free as seek_free
