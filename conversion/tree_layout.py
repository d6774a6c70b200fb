"""Which parameters each array of another JAX library's tree contains. `trees` reads and writes by these tables.

A layout maps the dotted name of an array to a `TreeTensor`: the parameters in it, and a letter for each of its axes.
kvjax stores the axes of each parameter in the order of `OWN_AXES`. The names and shapes are those of google-tunix
0.1.7, gemma 3.3.0 and MaxText 0.2.5.
"""

import dataclasses
import math
from collections.abc import Mapping

from kvjax.config import Llama3, ModelConfig, MoEConfig
from kvjax.models import abstract
from kvjax.models.params import tree_map_named

from .errors import CheckpointError, listed

OWN_AXES: Mapping[str, str] = {
    "embed": "VD",
    "head": "VD",
    "q": "NHD",
    "k": "NHD",
    "v": "NHD",
    "o": "DNH",
    "q_bias": "NH",
    "k_bias": "NH",
    "v_bias": "NH",
    "q_norm": "H",
    "k_norm": "H",
    "gate": "FD",
    "up": "FD",
    "down": "DF",
    "router": "ED",
    "gate_experts": "EFD",
    "up_experts": "EFD",
    "down_experts": "EDF",
}
"""Axes of a parameter by the last part of its name: V vocabulary, D model dim, N heads of this projection, H head dim, F hidden dim, E experts.

Adjacent axes may be one axis of kvjax's array. Norms are "D".
"""


@dataclasses.dataclass(frozen=True)
class TreeTensor:
    """One array of a tree.

    Attributes:
        holds: the parameters in it, named as by `kvjax.models.params.name_of`.
        axes: a letter of `OWN_AXES` for each axis, and "*" for the axis along which parameters are stacked. A vector of
            all heads is "Q".
        factor: number by which kvjax's parameter is larger.
        pairs: whether rotary pairs are the channels (2i, 2i + 1) of H instead of (i, i + H/2).
    """

    holds: tuple[str, ...]
    axes: str
    factor: float = 1.0
    pairs: bool = False

    def own_axes(self, parameter: str) -> str:
        """Axes of one of the parameters, as kvjax stores them."""
        if self.axes == "Q":
            return "Q"
        return OWN_AXES.get(parameter.rpartition(".")[2], "D")

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of the array in a model."""
        sizes = axis_sizes(config, self.holds[0]) | {"*": len(self.holds)}
        return tuple(sizes[axis] for axis in self.axes)


TreeLayout = Mapping[str, TreeTensor]
"""Arrays of a tree by their dotted names."""

_Rows = Mapping[str, tuple[str, str]]
"""Arrays with one parameter each: its name and the axes."""

_TUNIX: _Rows = {
    "embedder.input_embedding": ("embed", "VD"),
    "final_norm.w": ("norm", "D"),
    "lm_head.w": ("head", "DV"),
}
_TUNIX_LAYER: _Rows = {
    "input_layernorm.w": ("attn_norm", "D"),
    "attn.q_proj.w": ("attn.q", "DNH"),
    "attn.k_proj.w": ("attn.k", "DNH"),
    "attn.v_proj.w": ("attn.v", "DNH"),
    "attn.o_proj.w": ("attn.o", "NHD"),
    "attn.q_bias": ("attn.q_bias", "Q"),
    "attn.k_bias": ("attn.k_bias", "Q"),
    "attn.v_bias": ("attn.v_bias", "Q"),
    "attn.q_norm.w": ("attn.q_norm", "H"),
    "attn.k_norm.w": ("attn.k_norm", "H"),
    "post_attention_layernorm.w": ("mlp_norm", "D"),
    "mlp.gate_proj.kernel": ("mlp.gate", "DF"),
    "mlp.up_proj.kernel": ("mlp.up", "DF"),
    "mlp.down_proj.kernel": ("mlp.down", "FD"),
}
_GEMMA: _Rows = {"embedder.input_embedding": ("embed", "VD"), "final_norm.scale": ("norm", "D")}
_GEMMA_LAYER: _Rows = {
    "pre_attention_norm.scale": ("attn_norm", "D"),
    "post_attention_norm.scale": ("attn_post_norm", "D"),
    "pre_ffw_norm.scale": ("mlp_norm", "D"),
    "post_ffw_norm.scale": ("mlp_post_norm", "D"),
    "attn._query_norm.scale": ("attn.q_norm", "H"),
    "attn._key_norm.scale": ("attn.k_norm", "H"),
    "attn.attn_vec_einsum.w": ("attn.o", "NHD"),
}
_MAXTEXT: _Rows = {
    "token_embedder.embedding": ("embed", "VD"),
    "decoder.decoder_norm.scale": ("norm", "D"),
    "decoder.logits_dense.kernel": ("head", "DV"),
}
_MAXTEXT_LAYER: _Rows = {
    "pre_self_attention_layer_norm.scale": ("attn_norm", "D"),
    "self_attention.query.kernel": ("attn.q", "DNH"),
    "self_attention.key.kernel": ("attn.k", "DNH"),
    "self_attention.value.kernel": ("attn.v", "DNH"),
    "self_attention.out.kernel": ("attn.o", "NHD"),
    "self_attention.query.bias": ("attn.q_bias", "NH"),
    "self_attention.key.bias": ("attn.k_bias", "NH"),
    "self_attention.value.bias": ("attn.v_bias", "NH"),
    "self_attention.query_norm.scale": ("attn.q_norm", "H"),
    "self_attention.key_norm.scale": ("attn.k_norm", "H"),
    "post_self_attention_layer_norm.scale": ("mlp_norm", "D"),
    "mlp.wi_0.kernel": ("mlp.gate", "DF"),
    "mlp.wi_1.kernel": ("mlp.up", "DF"),
    "mlp.wo.kernel": ("mlp.down", "FD"),
}
_MAXTEXT_EXPERTS: _Rows = {
    "gate.kernel": ("mlp.router", "DE"),
    "wi_0": ("mlp.gate_experts", "EDF"),
    "wi_1": ("mlp.up_experts", "EDF"),
    "wo": ("mlp.down_experts", "EFD"),
}
_MAXTEXT_MOE: Mapping[str, str] = {"qwen3_moe": "moe_block", "mixtral": "MoeBlock_0"}
"""MaxText's names of the mixture of experts, by family."""

_MAXTEXT_SCALED = ("llama", "mistral", "mixtral")
"""Families whose queries MaxText does not scale: the factor 1 / sqrt(H) is part of the weights."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "tunix": ("llama", "qwen2", "qwen3", "gemma3_text"),
    "gemma": ("gemma3_text",),
    "maxtext": ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
}
"""Supported families by layout."""


def tree_layout(config: ModelConfig, layout: str, stacked: bool = True) -> TreeLayout:
    """Layout of a library's tree for a model.

    Args:
        config: the model's configuration.
        layout: "tunix", "gemma" or "maxtext".
        stacked: whether MaxText's layers are stacked, as with `scan_layers=True` and `param_scan_axis=1`.

    Raises:
        CheckpointError: the layout is unknown, or has no place for a part of the model.
    """
    if layout not in FAMILIES:
        raise CheckpointError(f"layout={layout!r}: unknown. Use {', '.join(FAMILIES)}.")
    if config.family not in FAMILIES[layout]:
        raise CheckpointError(
            f"{layout}: family {config.family!r} is not supported. Supported are {', '.join(FAMILIES[layout])}."
        )
    if layout == "maxtext":
        table = _maxtext(config, stacked)
    else:
        table = _gemma(config, layout) if config.family == "gemma3_text" else _tunix(config)
    own: set[str] = set()
    tree_map_named(lambda name, _: own.add(name), abstract(config))
    table = {name: tensor for name, tensor in table.items() if own.issuperset(tensor.holds)}
    if missing := own.difference(*(tensor.holds for tensor in table.values())):
        raise CheckpointError(
            f"{layout}: a {config.family} model of this library has no {listed(missing)}. Use another configuration."
        )
    return table


def _tunix(config: ModelConfig) -> dict[str, TreeTensor]:
    rows = (_in_layer(_TUNIX_LAYER, i, f"layers.{i}") for i in range(config.num_layers))
    return _single(_TUNIX) | {name: tensor for layer in rows for name, tensor in layer.items()}


def _gemma(config: ModelConfig, layout: str) -> dict[str, TreeTensor]:
    """The tree of gemma and of tunix's Gemma 3, whose MLPs and names of layers differ."""
    table = _single(_GEMMA)
    for i, layer in enumerate(config.layers):
        own = f"layers.{i}"
        theirs = f"layer_{i}" if layout == "gemma" else own
        table |= _in_layer(_GEMMA_LAYER, i, theirs)
        q, k, v, gate, up = (f"{own}.{name}" for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"))
        if layer.attention.num_heads == layer.attention.num_kv_heads:
            table[f"{theirs}.attn.qkv_einsum.w"] = TreeTensor((q, k, v), "*NDH")
        else:
            table[f"{theirs}.attn.q_einsum.w"] = TreeTensor((q,), "NDH")
            table[f"{theirs}.attn.kv_einsum.w"] = TreeTensor((k, v), "*NDH")
        if layout == "gemma":
            table[f"{theirs}.mlp.gating_einsum"] = TreeTensor((gate, up), "*FD")
            table[f"{theirs}.mlp.linear"] = TreeTensor((f"{own}.mlp.down",), "FD")
        else:
            mlp = {name: row for name, row in _TUNIX_LAYER.items() if name.startswith("mlp.")}
            table |= _in_layer(mlp, i, theirs)
    return table


def _maxtext(config: ModelConfig, stacked: bool) -> dict[str, TreeTensor]:
    if config.rope.scaling is not None and not isinstance(config.rope.scaling, Llama3):
        raise CheckpointError(
            f"maxtext: {type(config.rope.scaling).__name__} scaling of rotary embeddings is not supported. Use a model "
            "without it, or with Llama 3's."
        )
    rows = dict(_MAXTEXT_LAYER)
    if config.family in _MAXTEXT_MOE:
        rows |= {f"{_MAXTEXT_MOE[config.family]}.{name}": row for name, row in _MAXTEXT_EXPERTS.items()}
    layers = [_in_layer(rows, i, "") for i in range(config.num_layers)]
    for layer in layers:
        for name, tensor in layer.items():
            is_query, is_key = (name.startswith(f"self_attention.{x}.") for x in ("query", "key"))
            layer[name] = dataclasses.replace(
                tensor,
                factor=math.sqrt(config.head_dim) if is_query and config.family in _MAXTEXT_SCALED else 1.0,
                pairs=(is_query or is_key) and config.rope.scaling is not None,
            )
    table = _single(_MAXTEXT)
    if not stacked:
        return table | {
            f"decoder.layers_{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()
        }
    for name, tensor in layers[0].items():
        holds = tuple(parameter for layer in layers for parameter in layer[name].holds)
        axes = f"{tensor.axes[0]}*{tensor.axes[1:]}"
        table[f"decoder.layers.{name}"] = dataclasses.replace(tensor, holds=holds, axes=axes)
    return table


def _single(rows: _Rows) -> dict[str, TreeTensor]:
    return {name: TreeTensor((parameter,), axes) for name, (parameter, axes) in rows.items()}


def _in_layer(rows: _Rows, i: int, prefix: str) -> dict[str, TreeTensor]:
    """Arrays of layer i. Their names begin with the prefix."""
    return {
        f"{prefix}.{name}".lstrip("."): TreeTensor((f"layers.{i}.{parameter}",), axes)
        for name, (parameter, axes) in rows.items()
    }


def axis_sizes(config: ModelConfig, parameter: str) -> dict[str, int]:
    """Size of each axis of a parameter, by letter."""
    sizes = {"V": config.vocab_size, "D": config.hidden_size}
    if not parameter.startswith("layers."):
        return sizes
    _, number, part, *rest = parameter.split(".")
    layer = config.layers[int(number)]
    if part == "attn":
        heads = layer.attention.num_kv_heads if rest[0][0] in "kv" else layer.attention.num_heads
        head_dim = layer.attention.head_dim
        return sizes | {"N": heads, "H": head_dim, "Q": heads * head_dim}
    mlp = layer.mlp
    return sizes | {"F": mlp.width, "E": mlp.experts if isinstance(mlp, MoEConfig) else 0}
