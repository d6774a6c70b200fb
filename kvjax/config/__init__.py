"""What a model is, in numbers: its shape, its rotary embedding, and the shapes of well-known models. Imports nothing else of kvjax."""

from .model import AttentionConfig as AttentionConfig
from .model import DeltaNetConfig as DeltaNetConfig
from .model import LayerConfig as LayerConfig
from .model import MLPConfig as MLPConfig
from .model import ModelConfig as ModelConfig
from .model import MoEConfig as MoEConfig
from .presets import PRESETS as PRESETS
from .rope import NO_ROPE as NO_ROPE
from .rope import Linear as Linear
from .rope import Llama3 as Llama3
from .rope import LongRope as LongRope
from .rope import Rope as Rope
from .rope import RopeConfig as RopeConfig
from .rope import RopeScaling as RopeScaling
from .rope import Yarn as Yarn
