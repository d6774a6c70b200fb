"""One decoder-only transformer for the Llama lineage: parameters, forward pass and sharding; its configuration is in `kvjax.config`."""

from kvjax.config import PRESETS as PRESETS
from kvjax.config import ModelConfig as ModelConfig
from kvjax.config import Rope as Rope
from kvjax.config import RopeConfig as RopeConfig

from .params import Params as Params
from .params import abstract as abstract
from .params import init as init
