"""kvjax: the KV cache of Llama- and Qwen-family language models, kept within a budget."""

from ._version import __version__ as __version__
