"""Configurations of other JAX libraries as `ModelConfig`. Only attributes are read; the libraries are not imported."""

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.config import AttentionConfig, LayerConfig, Linear, Llama3, MLPConfig, ModelConfig, MoEConfig, RopeConfig

from .errors import CheckpointError
from .hf_config import FAMILIES, from_hf

MAX_POSITION = 1 << 17
"""Window in tokens of models of these libraries, which have none."""

TUNIX_THETA = 1_000_000
"""Base of the rotary embedding in tunix's Qwen3 and Llama 3, which do not read `rope_theta` of their configuration."""

_TUNIX: Mapping[str, str] = {"qwen2": "qwen2", "qwen3": "qwen3", "llama3": "llama", "gemma3": "gemma3_text"}
"""Families by the names of tunix's modules."""

_MAXTEXT: Mapping[str, str] = {
    "llama2": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
}
"""Families by MaxText's `decoder_block`."""


def tree_config(config: Any, layout: str) -> ModelConfig:
    """The configuration of a model whose parameters are in a library's tree.

    Args:
        config: a `ModelConfig`, a Hugging Face configuration, or the configuration of the library.
        layout: "tunix", "gemma" or "maxtext".

    Raises:
        CheckpointError: the configuration is not one of these, or its model is not supported.
    """
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, Mapping):
        return from_hf(config, source="config")
    if isinstance(getattr(config, "model_type", None), str) and callable(getattr(config, "to_dict", None)):
        return from_hf(config.to_dict(), source="config")
    reader = _READERS.get(layout)
    if reader is None:
        raise CheckpointError(f"layout={layout!r}: unknown. Use {', '.join(_READERS)}.")
    try:
        return reader(config)
    except AttributeError as error:
        raise CheckpointError(
            f"{layout}: a configuration of type {type(config).__name__} cannot be read ({error}). Pass a ModelConfig, a "
            f"Hugging Face configuration or one of {layout}."
        ) from error


def _tunix(config: Any) -> ModelConfig:
    """Configuration of tunix. Its classes have one name, so their modules tell the families apart."""
    module = next((part for part in reversed(type(config).__module__.split(".")) if part in _TUNIX), None)
    if module is None:
        raise CheckpointError(
            f"tunix: a configuration of {type(config).__module__} is not supported. Use one of {', '.join(_TUNIX)}."
        )
    if module == "gemma3":
        local = [(i + 1) % FAMILIES["gemma3_text"].window_every != 0 for i in range(config.num_layers)]
        return _gemma3(config, local)
    return tunix_config(config, _TUNIX[module])


def tunix_config(config: Any, family: str) -> ModelConfig:
    """Configuration of tunix for a model of the family "llama", "qwen2" or "qwen3".

    Raises:
        CheckpointError: the model has experts.
    """
    if getattr(config, "num_experts", None):
        raise CheckpointError(f"tunix: a model with {config.num_experts} experts is not supported. Use a dense model.")
    return ModelConfig.uniform(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position=MAX_POSITION,
        rope=RopeConfig(theta=float(config.rope_theta if family == "qwen2" else TUNIX_THETA), dim=config.head_dim),
        norm_eps=config.norm_eps,
        tied=config.weight_tying if family == "llama" else config.use_tied_embedding,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _gemma(config: Any) -> ModelConfig:
    """`TransformerConfig` of the package gemma."""
    if config.attn_logits_soft_cap is not None:
        raise CheckpointError("gemma: attn_logits_soft_cap is not supported, as attention kernels have no cap.")
    if not (config.use_qk_norm and config.transpose_gating_einsum):
        raise CheckpointError("gemma: this is not a configuration of Gemma 3, the only supported generation.")
    return _gemma3(config, [kind.name == "LOCAL_SLIDING" for kind in config.attention_types])


def _gemma3(config: Any, local: list[bool]) -> ModelConfig:
    """Gemma 3 by the names that gemma and tunix share. `local` tells which layers have a window."""
    family, width = FAMILIES["gemma3_text"], config.embed_dim
    by_width = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
    divisor = width // config.num_heads if by_width else config.head_dim
    kinds = {}
    for is_local in (False, True):
        which = "local" if is_local else "global"
        theta, factor = getattr(config, f"{which}_base_frequency"), getattr(config, f"{which}_scale_factor")
        mixer = AttentionConfig(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            RopeConfig(float(theta), config.head_dim, scaling=None if factor == 1 else Linear(factor)),
            window=config.sliding_window_size if is_local else None,
            scale=divisor**-0.5,
            qk_norm=True,
        )
        kinds[is_local] = LayerConfig(mixer, MLPConfig(config.hidden_dim, activation=family.activation), family.norms)
    return ModelConfig(
        family="gemma3_text",
        vocab_size=config.num_embed,
        hidden_size=width,
        layers=tuple(kinds[is_local] for is_local in local),
        max_position=MAX_POSITION,
        norm_eps=family.norm_eps,
        norm_offset=family.norm_offset,
        tied=True,
        embed_scale=width**0.5,
        logit_cap=getattr(config, "final_logit_softcap", None),
    )


def _maxtext(config: Any) -> ModelConfig:
    """MaxText's configuration, such as the result of `pyconfig.initialize`."""
    block = str(getattr(config.decoder_block, "value", config.decoder_block))
    if block not in _MAXTEXT:
        raise CheckpointError(f"maxtext: decoder_block={block} is not supported. Supported are {', '.join(_MAXTEXT)}.")
    if config.logits_via_embedding and config.normalize_embedding_logits:
        raise CheckpointError(
            "maxtext: normalize_embedding_logits=True is not supported. Train with False, as Qwen's models."
        )
    family = _MAXTEXT[block]
    is_llama3 = config.rope_type.startswith("llama3.1") or config.model_name.startswith("llama3.1")
    if is_llama3 and not config.rope_use_scale:
        raise CheckpointError("maxtext: rope_use_scale=False is not supported for Llama 3.1's rotary embedding.")
    mixer = AttentionConfig(
        config.num_query_heads,
        config.num_kv_heads,
        config.head_dim,
        RopeConfig(
            float(config.rope_max_timescale),
            config.head_dim,
            scaling=Llama3(8.0, 1.0, 4.0, 8192) if is_llama3 else None,
        ),
        qkv_bias=config.attention_bias,
        qk_norm=config.use_qk_norm,
    )
    mlp: MLPConfig | MoEConfig = MLPConfig(config.mlp_dim)
    if FAMILIES[family].experts is not None:
        normalized = FAMILIES[family].normalized
        mlp = MoEConfig(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_mlp_dim,
            config.norm_topk_prob if normalized is None else normalized,
        )
    return ModelConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.emb_dim,
        layers=(LayerConfig(mixer, mlp),) * config.num_decoder_layers,
        max_position=MAX_POSITION,
        norm_eps=config.normalization_layer_epsilon,
        tied=config.logits_via_embedding,
    )


_READERS: Mapping[str, Callable[[Any], ModelConfig]] = {"tunix": _tunix, "gemma": _gemma, "maxtext": _maxtext}
