"""Small random transformers models of every supported architecture, and the same models in kvjax.

Importing this module is free; transformers and torch are imported when a model is built.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.conversion import from_hf, from_state_dict, to_hf
from kvjax.conversion.delta_nets import as_stored
from kvjax.conversion.hf_config import FAMILIES
from kvjax.conversion.layout import hf_layout
from kvjax.models import Params
from kvjax.models.params import name_of
from kvjax.models.transformer import forward

SIZES = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": [2],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def _longrope(original: int, pairs: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
            "long_factor": [1.0 + 0.9 * i for i in range(pairs)],
            "original_max_position_embeddings": original,
        },
    }


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


_HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

# name → transformers model_type, and what differs from the sizes above. Windows of 16 and 8 are shorter than the prompts.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 6, "head_dim": 6, **_plain(1e4)}),
    "llama-3": ("llama", _plain(5e5)),
    "llama-3.1": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-3.2": ("llama", {"rope_parameters": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, **_plain(1e4)}),
    "deepseek-r1-distill-llama": ("llama", {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5, "head_dim": 6}),
    "yi": ("llama", {"num_key_value_heads": 1, **_plain(5e6)}),
    "longchat": (
        "llama",
        {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
    ),
    "smollm2": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, **_plain(1e5)},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, **_plain(1e6)}),
    "qwen2-windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
            **_plain(1e6),
        },
    ),
    "qwen2.5-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16, **_plain(1e6)}),
    "qwen3-yarn-biased": ("qwen3", {"attention_bias": True, "rope_parameters": _YARN | {"attention_factor": 1.3}}),
    "mistral": ("mistral", {"sliding_window": 16, **_plain(1e4)}),
    "mistral-nemo": ("mistral", {"sliding_window": None, "head_dim": 16, **_plain(1e6)}),
    "phi-3": ("phi3", {"num_key_value_heads": 6, "sliding_window": 8, **_plain(1e4)}),
    "phi-3-longrope-short": ("phi3", {"head_dim": 6, "sliding_window": 200, **_longrope(128, 3)}),
    "phi-3-longrope-long": ("phi3", {"head_dim": 6, "sliding_window": 200, **_longrope(4, 3)}),
    "phi-4": ("phi3", {"sliding_window": None, **_plain(2.5e5)}),
    "phi-4-mini": (
        "phi3",
        {
            "hidden_size": 48,
            "head_dim": 8,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "sliding_window": None,
            **_longrope(128, 3),
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, **_plain(2e6)}),
    "smollm3-yarn": ("smollm3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False, "rope_parameters": _YARN}),
    "granite": (
        "granite",
        {
            "head_dim": 6,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.8,
            "mlp_bias": True,
            **_plain(1e4),
        },
    ),
    "ministral-3": (
        "ministral3",
        {
            "rope_parameters": _YARN
            | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4}
        },
    ),
    "seed-oss": ("seed_oss", {"head_dim": 16, **_plain(1e7)}),
    "glm": ("glm", {"attention_bias": True, "eos_token_id": [2], "rms_norm_eps": 1.5e-7, **_plain(1e4)}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    # Prompts are longer than a chunk of the delta rule. Key heads serve two value heads each.
    "qwen3.5": ("qwen3_5_text", _HYBRID | {"num_hidden_layers": 4, "full_attention_interval": 2, **_plain(1e4)}),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        _HYBRID
        | {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "tie_word_embeddings": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            **_plain(1e6),
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        _HYBRID
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            **_plain(1e6),
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            **_plain(1e6),
        },
    ),
    "olmoe": (
        "olmoe",
        {
            "head_dim": 6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
            "num_key_value_heads": 3,
            **_plain(1e4),
        },
    ),
    "olmo2": ("olmo2", {"head_dim": 6, "num_key_value_heads": 3, "attention_bias": True, **_plain(5e5)}),
    # Only layers with full attention have a scaled rotary embedding.
    "olmo3": (
        "olmo3",
        {
            "head_dim": 6,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": _YARN,
            },
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **_plain(1e6)}),
    # The attention scale is not that of the head dim, and layers with a window have a rotary embedding of their own.
    "gemma-3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            },
        },
    ),
    "gemma-3-capped": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 16,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "glm-4.5": (
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "glm-4.5-air": (
        "glm4_moe",
        {
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    # Attention sinks, biased experts with a clamped activation, and a rotary embedding without rounded bounds.
    "gpt-oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "rope_parameters": _YARN | {"rope_theta": 1.5e5, "truncate": False},
        },
    ),
    "gpt-oss-full": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_bias": False,
            **_plain(1e4),
        },
    ),
    "glm-4-0414": ("glm4", {"attention_bias": False, "eos_token_id": [2], "head_dim": 16, **_plain(1e4)}),
}


@functools.partial(jax.jit, static_argnames="dtype")
def numbers(matrix: Any, dtype: str = "float32") -> jax.Array:
    """The numbers of a matrix in 8 or 4 bits, by one program: operation by operation there would be ten for each shape."""
    return matrix.dequantized(jax.numpy.dtype(dtype))


@jax.jit
def logits(params: Params, tokens: Any) -> jax.Array:
    """Logits [B, T, V] of a model."""
    return forward(params, jax.numpy.asarray(tokens))


def randomise(torch: Any, model: Any, seed: int = 0, gain: float = 1.0) -> None:
    """Draw the weights of a transformers model. `gain` is that of a norm that does not scale: Gemma's adds one to it."""
    generator = torch.Generator().manual_seed(seed)
    for path, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "linear_attn" in path and weight.ndim == 1:
            weight.data = (1.0 if path.endswith("norm.weight") else 0.0) + 0.5 * noise
        elif weight.ndim >= 2:
            fan_in = weight.shape[-1]
            sharpness = 1.7 if any(part in path for part in ("q_proj.", "k_proj.", "qkv_proj.")) else 1.0
            weight.data = noise * sharpness / fan_in**0.5
        elif path.endswith("bias"):
            weight.data = 0.3 * noise
        else:
            weight.data = gain + 0.2 * noise
    for path, weight in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)


def transformers_model(name: str, seed: int = 0) -> Any:
    """A transformers model of architecture `name`, float32, with random weights.

    Weights are scaled so that logits are of order 1 and attention has clear favourites; transformers' own initialisation
    gives attention so even that a wrong rotary embedding would hardly show.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)  # several wait for each other for longer than one computes
    model_type, changes = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # it goes on as long as it is told to
    randomise(torch, model, seed, gain=1.0 - (FAMILIES[model_type].norm_offset or 0.0))
    return model.eval()


def converted(model: Any) -> Params:
    """The same model in kvjax, through the conversion that files go through."""
    tensors = {name: np.asarray(tensor.detach()) for name, tensor in model.state_dict().items()}
    config = from_hf(model.config.to_dict())
    if config.tied:
        tensors.pop("lm_head.weight", None)
    return from_state_dict(config, tensors)


def transformers_twin(params: Params) -> Any:
    """A transformers model with the weights of `params`, in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    initialization = pytest.importorskip("transformers.initialization")
    leaves = {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    state = {
        name: torch.from_numpy(
            as_stored(params.config, name, np.concatenate([np.asarray(leaves[part], np.float32) for part in parts]))
        )
        for name, parts in hf_layout(params.config).items()
    }
    if params.config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    fields = to_hf(params.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.set_num_threads(1)  # several wait for each other for longer than one computes
    with initialization.no_init_weights():  # weights are given below
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state, assign=True)
    return model.eval()
