"""Load and save checkpoints: Hugging Face safetensors, GGUF and Orbax, with their tokenizers and chat templates."""

from .describe import Description as Description
from .describe import describe as describe
from .errors import CheckpointError as CheckpointError
from .hf_config import from_hf as from_hf
from .hf_config import to_hf as to_hf
from .loading import load as load
from .state_dict import from_state_dict as from_state_dict
from .state_dict import quantize_weights as quantize_weights
from .tokenizer import Tokenizer as Tokenizer
from .trees import from_tree as from_tree
from .trees import to_tree as to_tree
from .writing import convert as convert
from .writing import save as save
