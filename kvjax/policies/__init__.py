"""Cache policies: one file a method. Importing this package registers them all."""

from .base import Policy as Policy
from .base import PolicyError as PolicyError
from .base import rotated as rotated
from .catekv import CateKV as CateKV
from .chelsea import Chelsea as Chelsea
from .chunkkv import ChunkKV as ChunkKV
from .chunkkv import chunk_token_hybrid as chunk_token_hybrid
from .clusterkv import ClusterKV as ClusterKV
from .compose import ByHead as ByHead
from .compose import ByLayer as ByLayer
from .compose import by_head as by_head
from .compose import by_layer as by_layer
from .full import Full as Full
from .profile import HeadProfile as HeadProfile
from .registry import get_policy as get_policy
from .registry import policies as policies
from .registry import register as register
from .streaming_llm import StreamingLLM as StreamingLLM
from .treekv import TreeKV as TreeKV
