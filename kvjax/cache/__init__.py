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
from .blocks import in_rows as in_rows
from .blocks import keep_places as keep_places
from .blocks import kept_and_block as kept_and_block
from .blocks import kept_as_prompt as kept_as_prompt
from .blocks import with_places as with_places
from .dealt import RUN as RUN
from .dealt import by_device as by_device
from .dealt import deal as deal
from .dealt import dealt_empty as dealt_empty
from .dealt import gathered as gathered
from .dealt import in_order as in_order
from .dealt import keys_at as keys_at
from .dealt import local_slots as local_slots
from .dealt import merged as merged
from .dealt import own as own
from .dealt import own_slot as own_slot
from .dealt import rows_at as rows_at
from .dealt import slots_of_leaves as slots_of_leaves
from .dealt import stripes as stripes
from .shard import Shard as Shard
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
from .state import gather_kept as gather_kept
from .state import map_kv as map_kv
from .tokens import Prompt as Prompt
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
