"""A decoder-only transformer of the Llama lineage: configuration, parameters, rotary embeddings, forward pass."""

from .config import ModelConfig as ModelConfig
from .params import Params as Params
from .params import abstract as abstract
from .params import init as init
