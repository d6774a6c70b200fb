"""Well-known model families that are not supported, and the reasons."""

from collections.abc import Mapping

_CAP = "attention logits are capped, which no attention kernel has"
_HYBRID = "its layers without attention are not implemented"
_LATENT = "multi-head latent attention (MLA) is not implemented"
_OWN_SELECTION = "the model itself selects the keys that it attends to"
_GEMMA_4 = "heads of several sizes and layers that share a cache are not implemented"

REFUSED: Mapping[str, str] = {
    "gemma2": _CAP,
    "gemma3n": "its transformer differs (AltUp, LAuReL)",
    "gemma3n_text": "its transformer differs (AltUp, LAuReL)",
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
    "llama4": "chunked attention is not implemented",
    "llama4_text": "chunked attention is not implemented",
    "deepseek2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _OWN_SELECTION,
    "deepseek_v4": _OWN_SELECTION,
    "glm_moe_dsa": _OWN_SELECTION,
    "glm4_moe_lite": _LATENT,
    "kimi_k2": _LATENT,
    "kimi_linear": _HYBRID,
    "minimax": _HYBRID,
    "lfm2": _HYBRID,
    "granitemoehybrid": _HYBRID,
    "granitehybrid": _HYBRID,
    "nemotron_h": _HYBRID,
    "falcon_h1": _HYBRID,
    "falcon-h1": _HYBRID,
}
"""Reasons by `model_type` of a config.json, and by `general.architecture` of a GGUF file."""


def why(name: object) -> str:
    """Why a family is not supported, as the end of a message; empty for an unknown one."""
    reason = REFUSED.get(name) if isinstance(name, str) else None
    return "" if reason is None else f". It is not supported because {reason}"
