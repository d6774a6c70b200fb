"""A decoder-only transformer for the Llama lineage: configuration, parameters, rotary embeddings and forward pass."""

from .config import ModelConfig as ModelConfig
from .params import Params as Params
from .params import abstract as abstract
from .params import init as init
