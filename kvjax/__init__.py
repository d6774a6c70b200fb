"""kvjax: the KV cache of Llama- and Qwen-family language models, kept within a budget.

    params = kvjax.load()
    print(kvjax.generate(params, "Once upon a time", policy="treekv", budget=256).text)
"""

from ._version import __version__ as __version__
from .conversion import load as load
from .generation import Generation as Generation
from .generation import Stats as Stats
from .generation import generate as generate
from .generation import stream as stream
from .policies import Policy as Policy
from .policies import PolicyError as PolicyError
from .policies import StreamingLLM as StreamingLLM
from .policies import TreeKV as TreeKV
from .policies import Full as Full
from .policies import get_policy as get_policy
from .policies import register as register
