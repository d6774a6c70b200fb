"""kvjax: KV cache compression within a budget, for Llama- and Qwen-family language models.

    params = kvjax.load()
    print(kvjax.generate(params, "Once upon a time", policy="treekv", budget=256).text)

Names are imported on first use, so that the command line does not wait for JAX.
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
    from .conversion.trees import Params as Params
    from .planning import Plan as Plan
    from .planning import plan as plan
    from .policies import Policy as Policy
    from .policies import PolicyError as PolicyError
    from .policies import by_head as by_head
    from .policies import by_layer as by_layer
    from .policies import chunk_token_hybrid as chunk_token_hybrid
    from .policies import chunkkv as chunkkv
    from .policies import critical as critical
    from .policies import get_policy as get_policy
    from .policies import offloaded as offloaded
    from .policies import prompt_only as prompt_only
    from .policies import pyramid as pyramid
    from .policies import quantized as quantized
    from .policies import recompress as recompress
    from .policies import register as register
    from .policies import then as then
    from .policies import thresholded as thresholded
    from .policies.methods import *  # noqa: F403
    from .runtime.aot import CompiledGenerator as CompiledGenerator
    from .runtime.aot import aot_compile as aot_compile
    from .runtime.engine import Engine as Engine
    from .runtime.exported import Exported as Exported
    from .runtime.exported import export as export
    from .runtime.exported import register_for_export as register_for_export
    from .runtime.generation import Generation as Generation
    from .runtime.generation import GenerationStats as GenerationStats
    from .runtime.generation import Reply as Reply
    from .runtime.generation import generate as generate
    from .runtime.generation import iterate as iterate
    from .runtime.generation import stream as stream
    from .runtime.kept_state import KeptState as KeptState
    from .runtime.session import Session as Session

_NAMES = {
    "conversion": (
        "load",
        "save",
    ),
    "conversion.trees": ("Params",),  # which registers what `Params.from_tree` calls
    "planning": (
        "Plan",
        "plan",
    ),
    "policies": (
        "Policy",
        "PolicyError",
        "by_head",
        "by_layer",
        "chunk_token_hybrid",
        "chunkkv",
        "critical",
        "get_policy",
        "offloaded",
        "prompt_only",
        "pyramid",
        "quantized",
        "recompress",
        "register",
        "then",
        "thresholded",
    ),
    "runtime.aot": (
        "CompiledGenerator",
        "aot_compile",
    ),
    "runtime.engine": ("Engine",),
    "runtime.exported": (
        "Exported",
        "export",
        "register_for_export",
    ),
    "runtime.generation": (
        "Generation",
        "GenerationStats",
        "Reply",
        "generate",
        "iterate",
        "stream",
    ),
    "runtime.kept_state": ("KeptState",),
    "runtime.session": ("Session",),
}
_MODULES = ("conversion", "evals", "models", "plots", "policies")
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_HOMES, *_methods(), *_MODULES})
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    # Modules, which are asked for here before they are imported, have names in small letters.
    if name not in _HOMES and not (name[0].isupper() and name in _methods()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES.get(name, 'policies')}", __name__), name)
    globals()[name] = value
    return value


def _methods() -> list[str]:
    """Names of the classes of policies."""
    return [name for name in vars(importlib.import_module(".policies.methods", __name__)) if name[0].isupper()]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
