"""Trees of tunix, gemma and MaxText from a Hugging Face state dict, written out by hand with NumPy."""

from typing import Any

import numpy as np


def tunix(state: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Any]:
    """`nnx.to_pure_dict(nnx.state(model))` of tunix's Llama 3, Qwen 2 and Qwen 3."""
    width, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layers = {}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        attn: dict[str, Any] = {
            "q_proj": {"w": layer["self_attn.q_proj.weight"].T.reshape(width, heads, -1)},
            "k_proj": {"w": layer["self_attn.k_proj.weight"].T.reshape(width, keys, -1)},
            "v_proj": {"w": layer["self_attn.v_proj.weight"].T.reshape(width, keys, -1)},
            "o_proj": {"w": layer["self_attn.o_proj.weight"].T.reshape(heads, -1, width)},
        }
        if "self_attn.q_proj.bias" in layer:
            attn |= {f"{letter}_bias": layer[f"self_attn.{letter}_proj.bias"] for letter in "qkv"}
        if "self_attn.q_norm.weight" in layer:
            attn["q_norm"] = {"w": layer["self_attn.q_norm.weight"]}
            attn["k_norm"] = {"w": layer["self_attn.k_norm.weight"]}
        layers[i] = {
            "input_layernorm": {"w": layer["input_layernorm.weight"]},
            "attn": attn,
            "post_attention_layernorm": {"w": layer["post_attention_layernorm.weight"]},
            "mlp": {name: {"kernel": layer[f"mlp.{name}.weight"].T} for name in ("gate_proj", "up_proj", "down_proj")},
        }
    tree = {
        "embedder": {"input_embedding": state["model.embed_tokens.weight"]},
        "layers": layers,
        "final_norm": {"w": state["model.norm.weight"]},
    }
    return tree | ({"lm_head": {"w": state["lm_head.weight"].T}} if "lm_head.weight" in state else {})


def gemma(state: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Any]:
    """`model.init(...)["params"]` of gemma's Gemma 3."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    tree: dict[str, Any] = {
        "embedder": {"input_embedding": state["model.embed_tokens.weight"]},
        "final_norm": {"scale": state["model.norm.weight"]},
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        width, head = config["hidden_size"], config["head_dim"]
        # [N H, D] to [N, D, H]
        q, k, v = (layer[f"self_attn.{name}_proj.weight"].reshape(-1, head, width).transpose(0, 2, 1) for name in "qkv")
        split = {"q_einsum": {"w": q}, "kv_einsum": {"w": np.stack([k, v])}}
        fused = {"qkv_einsum": {"w": np.stack([q, k, v])}} if heads == keys else None
        tree[f"layer_{i}"] = {
            "pre_attention_norm": {"scale": layer["input_layernorm.weight"]},
            "post_attention_norm": {"scale": layer["post_attention_layernorm.weight"]},
            "pre_ffw_norm": {"scale": layer["pre_feedforward_layernorm.weight"]},
            "post_ffw_norm": {"scale": layer["post_feedforward_layernorm.weight"]},
            "attn": {
                "_query_norm": {"scale": layer["self_attn.q_norm.weight"]},
                "_key_norm": {"scale": layer["self_attn.k_norm.weight"]},
                "attn_vec_einsum": {"w": layer["self_attn.o_proj.weight"].T.reshape(heads, head, width)},
                **(fused or split),
            },
            "mlp": {
                "gating_einsum": np.stack([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
                "linear": layer["mlp.down_proj.weight"].T,
            },
        }
    return tree


def tunix_gemma(state: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Any]:
    """Of tunix's Gemma 3, whose MLPs have three kernels."""
    tree = gemma(state, config)
    tree["layers"] = {i: tree.pop(f"layer_{i}") for i in range(config["num_hidden_layers"])}
    for i, layer in tree["layers"].items():
        names = ("gate_proj", "up_proj", "down_proj")
        layer["mlp"] = {name: {"kernel": state[f"model.layers.{i}.mlp.{name}.weight"].T} for name in names}
    return tree


def maxtext(state: dict[str, np.ndarray], config: dict[str, Any], stacked: bool) -> dict[str, Any]:
    """MaxText's parameters, with `scan_layers` or without it."""
    family, width, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    keys, count = config["num_key_value_heads"], config["num_hidden_layers"]
    head = len(state["model.layers.0.self_attn.q_proj.weight"]) // heads
    is_llama3 = (config.get("rope_scaling") or {}).get("rope_type") == "llama3"

    def neighbours(x: np.ndarray) -> np.ndarray:
        """Channels (i, i + H/2) side by side, as in Llama 3.1."""
        return np.stack([x[..., : head // 2], x[..., head // 2 :]], axis=-1).reshape(x.shape) if is_llama3 else x

    layers = []
    for i in range(count):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        query = neighbours(layer["self_attn.q_proj.weight"].T.reshape(width, heads, head))
        if family in ("llama", "mistral", "mixtral"):  # MaxText does not scale their queries
            query = query / np.float32(np.sqrt(head))
        attention: dict[str, Any] = {
            "query": {"kernel": query},
            "key": {"kernel": neighbours(layer["self_attn.k_proj.weight"].T.reshape(width, keys, head))},
            "value": {"kernel": layer["self_attn.v_proj.weight"].T.reshape(width, keys, head)},
            "out": {"kernel": layer["self_attn.o_proj.weight"].T.reshape(heads, head, width)},
        }
        for name, letter, size in (("query", "q", heads), ("key", "k", keys), ("value", "v", keys)):
            if f"self_attn.{letter}_proj.bias" in layer:
                attention[name]["bias"] = layer[f"self_attn.{letter}_proj.bias"].reshape(size, head)
            if f"self_attn.{letter}_norm.weight" in layer:
                attention[f"{name}_norm"] = {"scale": layer[f"self_attn.{letter}_norm.weight"]}
        made: dict[str, Any] = {
            "pre_self_attention_layer_norm": {"scale": layer["input_layernorm.weight"]},
            "post_self_attention_layer_norm": {"scale": layer["post_attention_layernorm.weight"]},
            "self_attention": attention,
        }
        if family in ("qwen3_moe", "mixtral"):
            block, names = {
                "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
                "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
            }[family]
            experts = range(sum(f"{block}.experts.{e}.{names[0]}.weight" in layer for e in range(64)))
            wi_0, wi_1, wo = (
                np.stack([layer[f"{block}.experts.{e}.{name}.weight"].T for e in experts]) for name in names
            )
            gate = {"kernel": layer[f"{block}.gate.weight"].T}
            moe = {"qwen3_moe": "moe_block", "mixtral": "MoeBlock_0"}[family]
            made[moe] = {"gate": gate, "wi_0": wi_0, "wi_1": wi_1, "wo": wo}
        else:
            names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
            made["mlp"] = {name: {"kernel": layer[f"mlp.{own}.weight"].T} for name, own in names.items()}
        layers.append(made)
    decoder = {"layers": _stacked(layers)} if stacked else {f"layers_{i}": layer for i, layer in enumerate(layers)}
    decoder["decoder_norm"] = {"scale": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        decoder["logits_dense"] = {"kernel": state["lm_head.weight"].T}
    return {"token_embedder": {"embedding": state["model.embed_tokens.weight"]}, "decoder": decoder}


def _stacked(layers: list[Any]) -> Any:
    if isinstance(layers[0], dict):
        return {name: _stacked([layer[name] for layer in layers]) for name in layers[0]}
    return np.stack(layers, axis=1)
