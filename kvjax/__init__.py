"""kvjax: the KV cache of Llama- and Qwen-family language models, kept within a budget.

    params = kvjax.load()
    print(kvjax.generate(params, "Once upon a time", policy="treekv", budget=256).text)

Names are imported when they are first used, so that the command line can answer without waiting for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import conversion as conversion
    from . import evals as evals
    from . import models as models
    from . import plots as plots
    from . import policies as policies
    from .conversion import load as load
    from .conversion import save as save
    from .models import Params as Params
    from .planning import Plan as Plan
    from .planning import plan as plan
    from .policies import CateKV as CateKV
    from .policies import ChunkKV as ChunkKV
    from .policies import ClusterKV as ClusterKV
    from .policies import Full as Full
    from .policies import Policy as Policy
    from .policies import PolicyError as PolicyError
    from .policies import StreamingLLM as StreamingLLM
    from .policies import TreeKV as TreeKV
    from .policies import get_policy as get_policy
    from .policies import register as register
    from .runtime.compiling import CompiledGenerator as CompiledGenerator
    from .runtime.compiling import aot_compile as aot_compile
    from .runtime.engine import Engine as Engine
    from .runtime.generation import Generation as Generation
    from .runtime.generation import GenerationStats as GenerationStats
    from .runtime.generation import Reply as Reply
    from .runtime.generation import generate as generate
    from .runtime.generation import stream as stream
    from .runtime.session import Session as Session

_NAMES = {
    "conversion": (
        "load",
        "save",
    ),
    "models": ("Params",),
    "planning": (
        "Plan",
        "plan",
    ),
    "policies": (
        "CateKV",
        "ChunkKV",
        "ClusterKV",
        "Full",
        "Policy",
        "PolicyError",
        "StreamingLLM",
        "TreeKV",
        "get_policy",
        "register",
    ),
    "runtime.compiling": (
        "CompiledGenerator",
        "aot_compile",
    ),
    "runtime.engine": ("Engine",),
    "runtime.generation": (
        "Generation",
        "GenerationStats",
        "Reply",
        "generate",
        "stream",
    ),
    "runtime.session": ("Session",),
}
_MODULES = ("conversion", "evals", "models", "plots", "policies")
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
