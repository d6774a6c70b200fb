"""Which parameters each checkpoint tensor contains. Loading and writing share this table.

A layout maps a tensor's name in the checkpoint to the parameters stacked in its rows, in order. Most tensors contain
one parameter; fused projections contain two or three. Loading slices the rows, and writing concatenates them.
"""

from collections.abc import Mapping

from kvjax.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig

from .hf_config import FAMILIES, Family

Layout = Mapping[str, tuple[str, ...]]
"""Checkpoint tensor name → parameters in its rows, named as by `kvjax.models.params.name_of`."""


def hf_layout(config: ModelConfig) -> Layout:
    """Layout of a Hugging Face checkpoint of `config.family`."""
    family = FAMILIES[config.family]
    blocks = {kind: _block(family, kind) for kind in config.kinds}
    layout: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("embed",), "model.norm.weight": ("norm",)}
    if not config.tied:
        layout["lm_head.weight"] = ("head",)
    for i, kind in enumerate(config.layers):
        layout |= {
            f"model.layers.{i}.{name}": tuple(f"layers.{i}.{p}" for p in held) for name, held in blocks[kind].items()
        }
    return layout


def _block(family: Family, kind: LayerConfig) -> dict[str, tuple[str, ...]]:
    """Layout of one layer, without the prefixes of its number."""
    block: dict[str, tuple[str, ...]] = {}
    if kind.norms != "post":
        block[f"{family.norm_names[0]}.weight"] = ("attn_norm",)
    block |= _attention(family, kind.mixer) if isinstance(kind.mixer, AttentionConfig) else _delta_net(family)
    if kind.norms != "pre":
        block[f"{family.norm_names[1]}.weight"] = ("attn_post_norm",)
        block[f"{family.norm_names[3]}.weight"] = ("mlp_post_norm",)
    if kind.norms != "post":
        block[f"{family.norm_names[2]}.weight"] = ("mlp_norm",)
    return block | (_experts(family, kind.mlp) if isinstance(kind.mlp, MoEConfig) else _mlp(family, kind.mlp))


def _attention(family: Family, mixer: AttentionConfig) -> dict[str, tuple[str, ...]]:
    block: dict[str, tuple[str, ...]] = {"self_attn.o_proj.weight": ("attn.o",)}
    if family.fused_qkv:
        block["self_attn.qkv_proj.weight"] = ("attn.q", "attn.k", "attn.v")
    else:
        block |= {f"self_attn.{x}_proj.weight": (f"attn.{x}",) for x in "qkv"}
    if mixer.qkv_bias:
        block |= {f"self_attn.{x}_proj.bias": (f"attn.{x}_bias",) for x in "qkv"}
    if mixer.output_bias:
        block["self_attn.o_proj.bias"] = ("attn.o_bias",)
    if mixer.qk_norm:
        block |= {f"self_attn.{x}_norm.weight": (f"attn.{x}_norm",) for x in "qk"}
    if mixer.sinks:
        block["self_attn.sinks"] = ("attn.sinks",)
    return block


def _delta_net(family: Family) -> dict[str, tuple[str, ...]]:
    """Layout of a gated delta net, which `kvjax.conversion.delta_nets` brings into this form."""
    if family.groups_heads:
        inputs: dict[str, tuple[str, ...]] = {
            "in_proj_qkvz.weight": ("q", "k", "v", "z"),
            "in_proj_ba.weight": ("beta", "alpha"),
        }
    else:
        inputs = {
            "in_proj_qkv.weight": ("q", "k", "v"),
            "in_proj_z.weight": ("z",),
            "in_proj_b.weight": ("beta",),
            "in_proj_a.weight": ("alpha",),
        }
    block = inputs | {
        "conv1d.weight": ("q_conv", "k_conv", "v_conv"),
        "A_log": ("log_decay",),
        "dt_bias": ("dt_bias",),
        "norm.weight": ("out_norm",),
        "out_proj.weight": ("o",),
    }
    return {f"linear_attn.{name}": tuple(f"attn.{x}" for x in held) for name, held in block.items()}


def _mlp(family: Family, mlp: MLPConfig) -> dict[str, tuple[str, ...]]:
    block: dict[str, tuple[str, ...]] = {"mlp.down_proj.weight": ("mlp.down",)}
    if family.fused_gate_up:
        block["mlp.gate_up_proj.weight"] = ("mlp.gate", "mlp.up")
    else:
        block |= {f"mlp.{x}_proj.weight": (f"mlp.{x}",) for x in ("gate", "up")}
    if mlp.bias:
        block |= {f"mlp.{x}_proj.bias": (f"mlp.{x}_bias",) for x in ("gate", "up", "down")}
    return block


def _experts(family: Family, mlp: MoEConfig) -> dict[str, tuple[str, ...]]:
    """Layout of experts, which `kvjax.conversion.experts` stacks."""
    names = family.experts
    assert names is not None
    block: dict[str, tuple[str, ...]] = {f"{names.prefix}.{names.router}.weight": ("mlp.router",)}
    if mlp.bias:
        block[f"{names.prefix}.{names.router}.bias"] = ("mlp.router_bias",)
    for ours, theirs in zip(("gate", "up", "down"), names.matrices, strict=True):
        block[f"{names.prefix}.experts.{theirs}.weight"] = (f"mlp.{ours}_experts",)
        if mlp.bias:
            block[f"{names.prefix}.experts.{theirs}.bias"] = (f"mlp.{ours}_experts_bias",)
        if mlp.shared:
            block[f"{names.prefix}.{names.shared}.{ours}_proj.weight"] = (f"mlp.shared.{ours}",)
    if mlp.router == "sigmoid":
        block[f"{names.prefix}.gate.e_score_correction_bias"] = ("mlp.choice_bias",)
    if mlp.shared_gate:
        block[f"{names.prefix}.{names.shared_gate}.weight"] = ("mlp.shared_gate",)
    return block
