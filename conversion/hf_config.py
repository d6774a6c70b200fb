"""Converts Hugging Face `config.json` to `ModelConfig` and back.

Both spellings of rotary embeddings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). The first is written, since every version reads it.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvjax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerConfig,
    Linear,
    Llama3,
    LongRope,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RopeScaling,
    Yarn,
)
from kvjax.config.model import Activation, Norms
from kvjax.pallas_kernels.activations import SWIGLU_ALPHA, SWIGLU_LIMIT

from .errors import CheckpointError, listed, shortened
from .refused import why
from .schema import Id, Layers, Positive, Size, Strict, checked

OWN_METHOD = "kvjax"
"""Name of kvjax's own quantisation in a config.json. The arrays in the file define it completely."""

OWN_MATRICES = "quantized_matrices"
"""Field of a config.json that lists the arrays of each quantised matrix that kvjax wrote."""

MXFP4 = "mxfp4"
"""Name of the quantisation of gpt-oss's experts, which `experts` reads."""

PACKED = ("gptq", "awq", "compressed-tensors")
"""Names of other libraries' quantisations that can be read, see `packed`."""


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture of experts in a layer of a checkpoint.

    Attributes:
        prefix: name of the mixture. The other names are below it.
        matrices: names of an expert's gate, up and down projections, below ``experts.{number}``.
        shared, shared_gate: names of the shared MLP and of the projection that weights it.
        router: name of the router.
        transposed: whether tensors of all experts are [E, in, out], and rows of gate and up projection alternate in them.
            Checkpoints are then written with such tensors.
    """

    prefix: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    router: str = "gate"
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """Defaults of a `model_type` for fields missing in config.json, and the layout of its checkpoints.

    Attributes:
        architecture: class name in transformers.
        norm_eps: default of `rms_norm_eps`.
        num_kv_heads: default of `num_key_value_heads`. None means num_attention_heads, as an explicit null does in
            every family.
        head_dim: default of `head_dim`; None means hidden_size / num_attention_heads.
        partial_rotary: default fraction of a head's channels that rotate.
        interleaved: whether rotary pairs are neighbouring channels.
        qkv_bias: True or False if fixed, None if `attention_bias` decides.
        default_bias: default of `attention_bias`.
        output_bias: whether `attention_bias` also adds a bias to the output projection.
        mlp_bias: whether `mlp_bias` is read.
        qk_norm, joint_qk_norm: as in `AttentionConfig`. `use_qk_norm` decides if `qk_norm` is None.
        norms: as in `LayerConfig`.
        norm_names: names of a layer's norms in the checkpoint: before and after attention, before and after the MLP. Those
            of norms that layers lack are empty.
        norm_offset: as in `ModelConfig`.
        activation: activation of the MLPs, as in `MLPConfig`.
        scales_embedding: whether embeddings are multiplied by the square root of hidden_size.
        multipliers: whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` are
            read, which are 1 by default.
        tied: default of `tie_word_embeddings`.
        windows: layers that `sliding_window` applies to: "none", "all", "some" (`layer_types` or
            `max_window_layers`), or "pattern" (`layer_types`, or all but each `sliding_window_pattern`-th layer).
        window: default of `sliding_window`.
        window_every: default of `sliding_window_pattern`.
        local_theta: default of `rope_local_base_freq`, the base of the rotary embedding in layers with a window. None
            if all layers have the same rotary embedding.
        unrotated_every: default of `no_rope_layer_interval`: each such layer has no rotary embedding, unless
            `no_rope_layers` says otherwise. None if all layers have one.
        query_scalar: default of `query_pre_attn_scalar`, whose inverse square root is the factor on attention logits.
            None means head_dim.
        gated: as in `AttentionConfig`.
        recurrent_other_than: default of `full_attention_interval`: layers other than each such one are gated delta nets,
            unless `layer_types` says otherwise. None if all layers have attention.
        groups_heads: whether checkpoints store projections of gated delta nets by key head.
        experts: names of the experts, if the family has them.
        normalized: whether weights of a token's experts are divided by their sum; None if `norm_topk_prob` decides.
        shared_experts: whether experts have a shared MLP beside them, with a gate.
        dense_layers: whether `decoder_sparse_step` and `mlp_only_layers` give layers a dense MLP. The width of experts is
            then `moe_intermediate_size`, and otherwise `intermediate_size`.
        sigmoid_router: whether experts are described as DeepSeek-V3's: `first_k_dense_replace` layers have a dense MLP, the
            router is a sigmoid with groups of experts, and the shared MLP is `n_shared_experts` times as wide as an expert.
        defaults: values of other fields that a config.json may leave out.
        sinks: as in `AttentionConfig`.
        grows_queries: whether `llama_4_scaling_beta` is read, as `query_growth` of `AttentionConfig`. Its period is the
            original window of the rotary embedding.
        bos, eos: defaults of `bos_token_id` and `eos_token_id`, used if the vocabulary contains them.
        fused_qkv, fused_gate_up: whether the checkpoint stores these projections stacked in one tensor.
    """

    architecture: str
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    partial_rotary: float = 1.0
    interleaved: bool = False
    qkv_bias: bool | None = False
    default_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | None = False
    joint_qk_norm: bool = False
    norms: Norms = "pre"
    norm_names: tuple[str, str, str, str] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    norm_offset: float | None = None
    activation: Activation = "silu"
    scales_embedding: bool = False
    multipliers: bool = False
    tied: bool = False
    windows: str = "none"
    window: int | None = None
    window_every: int = 6
    local_theta: float | None = None
    unrotated_every: int | None = None
    query_scalar: int | None = None
    gated: bool = False
    recurrent_other_than: int | None = None
    groups_heads: bool = False
    experts: ExpertNames | None = None
    normalized: bool | None = None
    shared_experts: bool = False
    dense_layers: bool = False
    sigmoid_router: bool = False
    sinks: bool = False
    grows_queries: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()
    fused_qkv: bool = False
    fused_gate_up: bool = False


_GLM = Family(
    "GlmForCausalLM",
    norm_eps=1.5625e-7,
    num_kv_heads=2,
    head_dim=128,
    partial_rotary=0.5,
    interleaved=True,
    qkv_bias=None,
    default_bias=True,
    eos=(151329, 151336, 151338),
    fused_gate_up=True,
)

_OLMO2 = Family(
    "Olmo2ForCausalLM",
    norm_eps=1e-5,
    qkv_bias=None,
    output_bias=True,
    qk_norm=True,
    joint_qk_norm=True,
    norms="post",
    norm_names=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    norm_offset=0.0,
    eos=(50279,),
)

_DELTA_NET = (
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_conv_kernel_dim", 4),
)

_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    num_kv_heads=4,
    head_dim=256,
    partial_rotary=0.25,
    qkv_bias=None,
    output_bias=True,
    qk_norm=True,
    norm_offset=1.0,
    gated=True,
    recurrent_other_than=4,
    defaults=_DELTA_NET,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, output_bias=True, mlp_bias=True, bos=1, eos=(2,)),
    "mistral": Family("MistralForCausalLM", num_kv_heads=8, windows="all", window=4096, bos=1, eos=(2,)),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=128,
        windows="all",
        grows_queries=True,
        bos=1,
        eos=(2,),
        defaults=(
            (
                "rope_parameters",
                {
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            ),
        ),
    ),
    "qwen2": Family("Qwen2ForCausalLM", num_kv_heads=32, qkv_bias=True, windows="some", window=4096),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=None,
        output_bias=True,
        qk_norm=True,
        windows="some",
        window=4096,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        num_kv_heads=16,
        qkv_bias=True,
        experts=ExpertNames(),
        shared_experts=True,
        dense_layers=True,
        defaults=(
            ("num_experts", 60),
            ("num_experts_per_tok", 4),
            ("moe_intermediate_size", 1408),
            ("shared_expert_intermediate_size", 5632),
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        num_kv_heads=4,
        qkv_bias=None,
        output_bias=True,
        qk_norm=True,
        experts=ExpertNames(),
        dense_layers=True,
        defaults=(("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768)),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": dataclasses.replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        num_kv_heads=2,
        experts=ExpertNames(),
        normalized=True,
        shared_experts=True,
        dense_layers=True,
        defaults=(
            *_DELTA_NET,
            ("intermediate_size", 512),
            ("num_experts", 256),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 512),
            ("shared_expert_intermediate_size", 512),
        ),
    ),
    "qwen3_next": dataclasses.replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        num_kv_heads=2,
        groups_heads=True,
        experts=ExpertNames(),
        shared_experts=True,
        dense_layers=True,
        defaults=(
            *_DELTA_NET,
            ("num_experts", 512),
            ("num_experts_per_tok", 10),
            ("moe_intermediate_size", 512),
            ("shared_expert_intermediate_size", 512),
            ("norm_topk_prob", True),
        ),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        norm_eps=1e-5,
        qkv_bias=None,
        output_bias=True,
        qk_norm=True,
        joint_qk_norm=True,
        experts=ExpertNames(),
        eos=(50279,),
        defaults=(("num_experts", 64), ("num_experts_per_tok", 8)),
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        windows="pattern",
        window=4096,
        window_every=4,
        local_theta=500000.0,
        defaults=(("rope_theta", 500000.0),),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        norm_eps=1e-5,
        num_kv_heads=8,
        windows="all",
        bos=1,
        eos=(2,),
        experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
        normalized=True,
        defaults=(("num_local_experts", 8), ("num_experts_per_tok", 2), ("rope_theta", 1000000.0)),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        norm_eps=1e-5,
        windows="all",
        fused_qkv=True,
        fused_gate_up=True,
        bos=1,
        eos=(32000,),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        num_kv_heads=4,
        qkv_bias=None,
        output_bias=True,
        mlp_bias=True,
        tied=True,
        unrotated_every=4,
        bos=128000,
        eos=(128001,),
        defaults=(("rope_theta", 2000000.0),),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        qkv_bias=None,
        output_bias=True,
        mlp_bias=True,
        multipliers=True,
        bos=1,
        eos=(2,),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=None,
        default_bias=True,
        mlp_bias=True,
        bos=0,
        eos=(2,),
    ),
    "glm": _GLM,
    "glm4": dataclasses.replace(_GLM, architecture="Glm4ForCausalLM", norms="both"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        norm_eps=1e-5,
        num_kv_heads=8,
        partial_rotary=0.5,
        qkv_bias=None,
        qk_norm=None,
        experts=ExpertNames(shared="shared_experts"),
        sigmoid_router=True,
        defaults=(("n_routed_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 1408)),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=64,
        qkv_bias=None,
        default_bias=True,
        output_bias=True,
        norm_offset=0.0,
        activation="clamped_swiglu",
        windows="pattern",
        window=128,
        window_every=2,
        experts=ExpertNames(router="router", transposed=True),
        normalized=True,
        sinks=True,
        defaults=(
            ("num_local_experts", 128),
            ("num_experts_per_tok", 4),
            ("rope_theta", 150000.0),
            (
                "rope_parameters",
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            ),
        ),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        num_kv_heads=4,
        head_dim=256,
        qkv_bias=None,
        output_bias=True,
        qk_norm=True,
        norms="both",
        norm_names=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        activation="gelu_tanh",
        scales_embedding=True,
        tied=True,
        windows="pattern",
        window=4096,
        local_theta=10000.0,
        query_scalar=256,
        bos=2,
        eos=(1,),
        defaults=(
            ("vocab_size", 262208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("max_position_embeddings", 131072),
            ("rope_theta", 1000000.0),
        ),
    ),
}
"""Supported values of `model_type`."""

_TEXT_OF: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "mistral3": ("mistral", "ministral3"),
}
"""Values of `model_type` of models with a vision tower, and those of their text models, which `text_config` describes. The
first one is the default.
"""

_SAME_AS: Mapping[str, tuple[str, Mapping[str, Any]]] = {"qwen3_vl_text": ("qwen3", {"rope_theta": 500000.0})}
"""Values of `model_type` of text models that compute what a family does, with defaults of their own.

Qwen3-VL rotates channels by three positions, which are equal in text.
"""

_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "clamped_swiglu": ("silu",),
}
"""Names of activations in a config.json. The first one is written."""

_PHI3_ORIGINAL_MAX_POSITION = 4096
"""Default of `original_max_position_embeddings` for Phi-3."""

_MAX_WINDOW_LAYERS = 28
"""Default of `max_window_layers`."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of layers. `rope_parameters` may have an object for each."""

_RECURRENT = "linear_attention"
"""Kind of a layer that has a gated delta net."""

Ids = Annotated[list[Id], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]
"""One token id or a list."""

_Length = Annotated[
    Size, BeforeValidator(lambda size: int(size) if isinstance(size, float) and size.is_integer() else size)
]
"""Length in tokens. An integral float is accepted, as in transformers."""


_Window = Annotated[Size | None, BeforeValidator(lambda size: None if type(size) is int and size == 0 else size)]
"""Window in tokens. transformers 5 may write 0 for none."""


class _Rope(Strict):
    """The fields of `rope_scaling` and `rope_parameters` that are read."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: _Length | None = None
    attention_factor: Positive | None = None
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    llama_4_scaling_beta: Annotated[float, Field(ge=0)] | None = None


class _Config(Strict):
    """The fields of a `config.json` that are read."""

    model_type: str
    hidden_act: str | None = None
    hidden_activation: str | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: _Length | None = None
    sliding_window: _Window = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    layer_types: list[str] | None = None
    sliding_window_pattern: Size | None = None
    rope_local_base_freq: Positive | None = None
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Size | None = None
    full_attention_interval: Size | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size | None = None
    query_pre_attn_scalar: Positive | None = None
    final_logit_softcapping: Positive | None = None
    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0
    attn_logit_softcapping: Positive | None = None
    clip_qkv: Positive | None = None
    use_bidirectional_attention: bool | None = None
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Size | None = None
    swiglu_alpha: Positive = SWIGLU_ALPHA
    swiglu_limit: Positive = SWIGLU_LIMIT
    use_qk_norm: bool | None = None
    n_routed_experts: Size | None = None
    n_shared_experts: Annotated[int, Field(ge=0)] = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1
    n_group: Size = 1
    topk_group: Size = 1
    routed_scaling_factor: Positive = 1.0
    mlp_only_layers: list[Annotated[int, Field(ge=0)]] | None = None
    bos_token_id: Ids | None = None
    eos_token_id: Ids | None = None

    def given(self, field: str, default: Any) -> Any:
        """Value of a field, which may be null; `default` only if the field is absent."""
        return getattr(self, field) if field in self.model_fields_set else default


class _Generation(Strict):
    """The field of a `generation_config.json` that is read."""

    eos_token_id: Ids | None = None


def from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> ModelConfig:
    """Convert the contents of a `config.json`.

    Args:
        config: its parsed contents.
        generation_config: contents of `generation_config.json`. Its `eos_token_id`, if present, takes precedence.
        source: file name for error messages.

    Returns:
        The configuration.

    Raises:
        CheckpointError: architecture, activation, rope type or quantisation is not supported, or a value is missing or
            out of range.

    Example:
        >>> config = kvjax.conversion.from_hf(kvjax.conversion.to_hf(params.config))
        >>> config.num_layers
        2
    """
    config = _text_config(config, source)
    family_name = config.get("model_type")
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        raise CheckpointError(
            f"{source}: unknown model_type {shortened(family_name)}; supported are {', '.join(FAMILIES)}{why(family_name)}"
        )
    family = FAMILIES[family_name]
    held = checked(_Config, {**dict(family.defaults), **config}, source)
    generation = checked(_Generation, generation_config or {}, Path(source).with_name("generation_config.json"))
    _refuse_unsupported(held, family, source)
    windows = _windows(held, family, source)
    default_eos = [token for token in family.eos if token < held.vocab_size]
    default_bos = [token for token in (family.bos,) if token is not None and token < held.vocab_size]

    def multiplier(value: float) -> float:
        return float(value) if family.multipliers else 1.0

    try:
        kinds = _kinds(held, family, windows, source)
        return ModelConfig(
            family=family_name,
            vocab_size=held.vocab_size,
            hidden_size=held.hidden_size,
            layers=_with_experts(
                held,
                family,
                _with_delta_nets(
                    held,
                    family,
                    [
                        kinds[window] if rotates else kinds[window].unrotated
                        for window, rotates in zip(windows, _rotating(held, family, source), strict=True)
                    ],
                    source,
                ),
            ),
            max_position=held.max_position_embeddings,
            norm_eps=_or(held.rms_norm_eps, family.norm_eps),
            norm_offset=family.norm_offset,
            tied=_or(held.tie_word_embeddings, family.tied),
            embed_scale=held.hidden_size**0.5 if family.scales_embedding else multiplier(held.embedding_multiplier),
            residual_scale=multiplier(held.residual_multiplier),
            logit_divisor=multiplier(held.logits_scaling),
            logit_cap=held.final_logit_softcapping,
            eos=tuple(_first(generation.eos_token_id, held.given("eos_token_id", default_eos), [])),
            bos=next(iter(held.given("bos_token_id", default_bos) or []), None),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Fields of a model's text part, under the `model_type` of a family. Other models are returned as they are."""
    name = config.get("model_type")
    if isinstance(name, str) and name in _TEXT_OF:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"{source}: text_config is {shortened(text)}; a {name} model needs an object there")
        shared = {key: config[key] for key in ("eos_token_id", "bos_token_id", "quantization_config") if key in config}
        # The head belongs to the whole model.
        tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
        whole, name = name, text.get("model_type", _TEXT_OF[name][0])
        if name not in _TEXT_OF[whole]:
            raise CheckpointError(
                f"{source}: text_config.model_type is {shortened(name)}; supported in a {whole} model are "
                f"{' and '.join(_TEXT_OF[whole])}"
            )
        config = {**shared, **text, **tied, "model_type": name}
    if isinstance(name, str) and name in _SAME_AS:
        family, defaults = _SAME_AS[name]
        return {**defaults, **config, "model_type": family}
    return config


def _kinds(
    held: _Config, family: Family, windows: tuple[int | None, ...], source: str
) -> dict[int | None, LayerConfig]:
    """The model's different layers, by window."""
    head_dim = held.head_dim or family.head_dim or held.hidden_size // held.num_attention_heads
    bias = _or(held.attention_bias, family.default_bias)
    scalar = _first(held.query_pre_attn_scalar if family.query_scalar else None, family.query_scalar)
    ropes = _ropes(held, family, head_dim, windows, source)
    mlp = MLPConfig(held.intermediate_size, family.mlp_bias and bool(held.mlp_bias), family.activation)
    growth, period = _query_growth(held, family, source)
    found: dict[int | None, LayerConfig] = {}
    for window in dict.fromkeys(windows):
        mixer = AttentionConfig(
            num_heads=held.num_attention_heads,
            num_kv_heads=held.given("num_key_value_heads", family.num_kv_heads) or held.num_attention_heads,
            head_dim=head_dim,
            rope=ropes[window],
            window=window,
            scale=float(held.attention_multiplier) if family.multipliers else scalar and scalar**-0.5,
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias and family.output_bias,
            qk_norm=bool(held.use_qk_norm) if family.qk_norm is None else family.qk_norm,
            joint_qk_norm=family.joint_qk_norm,
            query_growth=growth,
            query_period=period,
            gated=family.gated,
            sinks=family.sinks,
        )
        found[window] = LayerConfig(mixer, mlp, family.norms)
    return found


def _with_experts(held: _Config, family: Family, layers: list[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Layers with experts where the model has them, instead of the dense MLP."""
    if family.experts is None:
        return tuple(layers)
    if family.sigmoid_router:
        moe = _sigmoid_experts(held, family)
        dense = held.first_k_dense_replace
        return *layers[:dense], *(dataclasses.replace(layer, mlp=moe) for layer in layers[dense:])
    moe = MoEConfig(
        # Of files with both names, transformers 5 writes the first for Qwen, too.
        experts=_first(held.num_local_experts, held.num_experts),
        per_token=held.num_experts_per_tok or 1,
        width=(held.moe_intermediate_size if family.dense_layers else None) or held.intermediate_size,
        normalized=bool(held.norm_topk_prob) if family.normalized is None else family.normalized,
        shared=held.shared_expert_intermediate_size if family.shared_experts else None,
        shared_gate=family.shared_experts,
        activation=family.activation,
        bias=family.experts.transposed,
    )
    if not family.dense_layers:
        return tuple(dataclasses.replace(layer, mlp=moe) for layer in layers)
    step, dense = _or(held.decoder_sparse_step, 1), _or(held.mlp_only_layers, [])
    return tuple(
        layer if i in dense or (i + 1) % step else dataclasses.replace(layer, mlp=moe) for i, layer in enumerate(layers)
    )


def _with_delta_nets(held: _Config, family: Family, layers: list[LayerConfig], source: str) -> list[LayerConfig]:
    """Layers with gated delta nets where the model has them, instead of attention."""
    if family.recurrent_other_than is None:
        return layers
    every, kinds = _or(held.full_attention_interval, family.recurrent_other_than), held.layer_types
    if kinds is None:
        kinds = [_RECURRENT if (i + 1) % every else _LAYER_TYPES[0] for i in range(len(layers))]
    if set(kinds) - {_RECURRENT, _LAYER_TYPES[0]} or len(kinds) != len(layers):
        raise CheckpointError(
            f"{source}: layer_types needs {len(layers)} entries {_LAYER_TYPES[0]} or {_RECURRENT}, got {shortened(kinds)}"
        )
    mixer = DeltaNetConfig(
        key_heads=_or(held.linear_num_key_heads, 1),
        value_heads=_or(held.linear_num_value_heads, 1),
        key_dim=_or(held.linear_key_head_dim, 1),
        value_dim=_or(held.linear_value_head_dim, 1),
        conv=_or(held.linear_conv_kernel_dim, 4),
    )
    return [
        dataclasses.replace(layer, mixer=mixer) if kind == _RECURRENT else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def _delta_nets_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    if family.recurrent_other_than is None:
        return {}
    mixer, default = next(iter(config.recurrent_kinds), None), dict(_DELTA_NET)
    fields = {} if mixer is None else dict(zip(default, dataclasses.astuple(mixer), strict=True))
    kinds = [_LAYER_TYPES[0] if layer.cached else _RECURRENT for layer in config.layers]
    return fields | {"layer_types": kinds}


def _sigmoid_experts(held: _Config, family: Family) -> MoEConfig:
    width = held.moe_intermediate_size or held.intermediate_size
    return MoEConfig(
        experts=_first(held.n_routed_experts, held.num_local_experts),
        per_token=held.num_experts_per_tok or 1,
        width=width,
        normalized=_or(held.norm_topk_prob, True),
        shared=held.n_shared_experts * width or None,
        activation=family.activation,
        router="sigmoid",
        groups=held.n_group,
        groups_per_token=held.topk_group,
        output_scale=float(held.routed_scaling_factor),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write a `config.json` that transformers and `from_hf` both read as this model.

    Returns:
        The contents, to be written as JSON.

    Raises:
        CheckpointError: the family's `config.json` cannot express the configuration.

    Example:
        >>> kvjax.conversion.to_hf(params.config)["num_hidden_layers"]
        2
    """
    if config.family not in FAMILIES:
        raise CheckpointError(f"cannot write family {config.family!r}; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[config.family]
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "hidden_act": _ACTIVATIONS[family.activation][0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": _dense_width(config),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else list(config.eos) or None,
    }
    # By default, transformers pads with Phi-3's id, and rejects an id beyond the vocabulary.
    fields["pad_token_id"] = config.eos[0] if config.eos else None
    fields |= _ropes_to_hf(config, family)
    if family.grows_queries:
        fields["rope_parameters"] = _rope_and_growth(config, fields.pop("rope_theta"), fields.pop("rope_scaling", None))
    elif "rope_parameters" in dict(family.defaults) and "rope_scaling" not in fields:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    if family.qkv_bias is None:
        fields["attention_bias"] = config.qkv_bias
    if family.mlp_bias:
        fields["mlp_bias"] = config.mlp_bias
    if family.qk_norm is None:
        fields["use_qk_norm"] = config.qk_norm
    if family.experts is not None:
        fields |= _experts_to_hf(config, family)
    if family.activation == "gelu_tanh":
        fields["hidden_activation"] = fields.pop("hidden_act")
    if family.query_scalar is not None:
        fields["query_pre_attn_scalar"] = _whole(config.attention_kinds[0].logit_scale ** -2)
        fields["final_logit_softcapping"] = config.logit_cap
    if family.multipliers:
        fields |= {
            "embedding_multiplier": config.embed_scale,
            "attention_multiplier": config.attention_kinds[0].logit_scale,
            "residual_multiplier": config.residual_scale,
            "logits_scaling": config.logit_divisor,
        }
    fields |= _windows_to_hf(config, family) | _delta_nets_to_hf(config, family)
    if (read := from_hf(fields)) != config:
        raise CheckpointError(f"a {config.family} config.json cannot express {', '.join(_differing(config, read))}")
    return fields


def _differing(config: Any, read: Any) -> list[str]:
    """Fields of a dataclass that were read with another value, as text. Those of layers are listed alone."""
    found: list[str] = []
    for field in dataclasses.fields(config):
        own, other = getattr(config, field.name), getattr(read, field.name)
        if own == other:
            continue
        if field.name == "layers" and len(own) == len(other):
            found += next(_differing(a, b) for a, b in zip(own, other, strict=True) if a != b)
        elif dataclasses.is_dataclass(own) and type(own) is type(other) and field.name != "rope":
            found += _differing(own, other)
        else:
            found.append(f"{field.name}={own!r}")
    return found


def _refuse_unsupported(config: _Config, family: Family, source: str) -> None:
    allowed = _ACTIVATIONS[family.activation]
    for name in ("hidden_act", "hidden_activation"):
        if _or(getattr(config, name), allowed[0]) not in allowed:
            raise CheckpointError(
                f"{source}: {name} is {getattr(config, name)!r}; supported are {' and '.join(allowed)}"
            )
    limits = config.swiglu_alpha, config.swiglu_limit
    if family.activation == "clamped_swiglu" and limits != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise CheckpointError(
            f"{source}: swiglu_alpha and swiglu_limit are {limits[0]} and {limits[1]}; supported are {SWIGLU_ALPHA} and {SWIGLU_LIMIT}"
        )
    if config.attn_logit_softcapping is not None:
        raise CheckpointError(f"{source}: attn_logit_softcapping is not supported, as attention kernels have no cap")
    if config.clip_qkv is not None:
        raise CheckpointError(f"{source}: clip_qkv is not supported, as queries, keys and values are not clipped")
    if (family.dense_layers or family.unrotated_every or family.recurrent_other_than) and config.use_sliding_window:
        raise CheckpointError(f"{source}: use_sliding_window of a {config.model_type} model is not supported")
    if config.use_bidirectional_attention:
        raise CheckpointError(f"{source}: use_bidirectional_attention is not supported; models generate text in order")
    if config.quantization_config:
        method = config.quantization_config.get("quant_method", "an unnamed method")
        if method in (OWN_METHOD, *PACKED) or (method == MXFP4 and family.experts and family.experts.transposed):
            return
        raise CheckpointError(
            f"{source}: weights are quantised with {shortened(method)}; only {', '.join(PACKED)} are supported. "
            "Load the unquantised checkpoint or a GGUF file instead"
        )


def _ropes(
    config: _Config, family: Family, head_dim: int, windows: tuple[int | None, ...], source: str
) -> dict[int | None, RopeConfig]:
    """Read the rotary embedding of layers with each window."""
    found = {
        window: _rope_of(_LAYER_TYPES[window is not None], config, family, head_dim, source)
        for window in sorted(set(windows), key=lambda window: window is not None)
    }
    if len(set(found.values())) > 1 and family.local_theta is None:
        raise CheckpointError(
            f"{source}: rope_parameters of full_attention and sliding_attention differ; a {config.model_type} model has one "
            "rotary embedding for all layers"
        )
    return found


def _rope_of(kind: str, config: _Config, family: Family, head_dim: int, source: str) -> RopeConfig:
    """Read the rotary embedding of one kind of layers."""
    # `rope_scaling` takes precedence over `rope_parameters`, but the base may be in either or at the top level.
    beside = _rope_fields("rope_parameters", kind, config, source) or _Rope()
    theta = config.rope_theta
    if family.local_theta is not None and kind == "sliding_attention":  # `rope_scaling` is for full attention only
        rope, theta = beside, _or(config.rope_local_base_freq, family.local_theta)
    else:
        rope = _rope_fields("rope_scaling", kind, config, source) or beside
    share = _first(rope.partial_rotary_factor, config.partial_rotary_factor, family.partial_rotary)
    dim = int(head_dim * share)
    return RopeConfig(
        theta=float(_first(rope.rope_theta, beside.rope_theta, theta, 10000.0)),
        dim=dim,
        interleaved=family.interleaved,
        scaling=_scaling(rope, config, source),
    )


def _query_growth(config: _Config, family: Family, source: str) -> tuple[float, int | None]:
    """`query_growth` and `query_period` of attention. The rope fields have them."""
    fields = [each for each in (config.rope_scaling, config.rope_parameters) if each]
    growth = _first(*(each.get("llama_4_scaling_beta") for each in fields))
    if not growth:
        return 0.0, None
    if not family.grows_queries:
        raise CheckpointError(f"{source}: llama_4_scaling_beta of a {config.model_type} model is not supported")
    period = _first(*(each.get("original_max_position_embeddings") for each in fields))
    if period is None:
        raise CheckpointError(f"{source}: llama_4_scaling_beta needs original_max_position_embeddings beside it")
    return float(growth), int(period)


def _rope_fields(key: str, kind: str, config: _Config, source: str) -> _Rope | None:
    """Read the rope fields of a kind of layers; None if `key` is absent or empty.

    Raises:
        CheckpointError: the value contains objects, but none for this kind, or some under unknown names.
    """
    fields = getattr(config, key)
    if not fields:
        return None
    objects = {name for name, value in fields.items() if isinstance(value, Mapping)}
    if not objects:
        return checked(_Rope, fields, source, f"{key}.")
    if objects != fields.keys() or not objects.issubset(_LAYER_TYPES):
        raise CheckpointError(
            f"{source}: {key} has objects under {listed(objects)}; it should have the parameters of all layers, or one object for each of "
            f"{' and '.join(_LAYER_TYPES)}"
        )
    if kind not in objects:
        raise CheckpointError(f"{source}: {key} has no object for {kind}, but the model has such layers")
    return checked(_Rope, fields[kind], source, f"{key}.{kind}.")


def _scaling(rope: _Rope, config: _Config, source: str) -> RopeScaling | None:
    kind = _first(rope.rope_type, rope.type, "default")
    if rope.rope_type is rope.type is None and (null := rope.model_fields_set & {"rope_type", "type"}):
        raise CheckpointError(
            f"{source}: {min(null)} of a rotary embedding is null; give its name, such as 'linear' or 'default', or leave it out"
        )
    phi3, window = config.model_type == "phi3", config.max_position_embeddings
    if phi3 and kind in ("su", "yarn"):  # names that early Phi-3 checkpoints gave to LongRoPE
        kind = "longrope"
    # Phi-3 stores the original window outside of the rope fields, and that value takes precedence.
    original = _first(
        config.original_max_position_embeddings,
        rope.original_max_position_embeddings,
        _PHI3_ORIGINAL_MAX_POSITION if phi3 else window,
    )

    def number(key: str) -> float:
        if (value := getattr(rope, key)) is None:
            raise CheckpointError(f"{source}: rope type {kind!r} needs a number {key}")
        return value

    match kind:
        case "default":
            return None
        case "linear":
            return Linear(number("factor"))
        case "llama3":
            return Llama3(number("factor"), number("low_freq_factor"), number("high_freq_factor"), original)
        case "yarn":
            factor = number("factor") if window == original else _or(rope.factor, window / original)
            return Yarn(
                factor=factor,
                original_max_position=original,
                attention_factor=_yarn_attention_factor(rope, factor),
                beta_fast=_or(rope.beta_fast, 32.0),
                beta_slow=_or(rope.beta_slow, 1.0),
                truncate=_or(rope.truncate, True),
            )
        case "longrope":
            return LongRope(
                short_factor=tuple(rope.short_factor or ()),
                long_factor=tuple(rope.long_factor or ()),
                original_max_position=original,
                factor=_or(rope.factor, window / original),
                attention_factor=rope.attention_factor,
            )
        case _:
            raise CheckpointError(
                f"{source}: unsupported rope type {kind!r}; supported are default, linear, llama3, yarn and longrope"
            )


def _yarn_attention_factor(rope: _Rope, factor: float) -> float | None:
    """Factor on cosine and sine; None uses YaRN's own. The `mscale` fields are DeepSeek's variant."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if not (rope.mscale and rope.mscale_all_dim) or factor <= 1:
        return None
    return (0.1 * rope.mscale * math.log(factor) + 1.0) / (0.1 * rope.mscale_all_dim * math.log(factor) + 1.0)


def _dense_width(config: ModelConfig) -> int:
    """Width of the dense MLPs. A model without any writes that of its experts, which Mixtral reads from this field."""
    dense = [kind.mlp for kind in config.kinds if isinstance(kind.mlp, MLPConfig)]
    return dense[0].width if dense else config.kinds[0].mlp.width


def _experts_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    moe = next((kind.mlp for kind in config.kinds if isinstance(kind.mlp, MoEConfig)), None)
    if moe is None:
        raise CheckpointError(f"a {config.family} config.json cannot express a model without experts")
    if family.sigmoid_router:
        return {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.per_token,
            "moe_intermediate_size": moe.width,
            "n_shared_experts": (moe.shared or 0) // moe.width,
            "first_k_dense_replace": sum(isinstance(layer.mlp, MLPConfig) for layer in config.layers),
            "norm_topk_prob": moe.normalized,
            "n_group": moe.groups,
            "topk_group": moe.groups_per_token,
            "routed_scaling_factor": moe.output_scale,
        }
    if family.normalized is not None and not family.dense_layers:
        return {"num_local_experts": moe.experts, "num_experts_per_tok": moe.per_token}
    fields = {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
    }
    if family.normalized is None:
        fields["norm_topk_prob"] = moe.normalized
    if family.dense_layers:
        fields |= {
            "moe_intermediate_size": moe.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MLPConfig)],
        }
    return fields | ({"shared_expert_intermediate_size": moe.shared} if family.shared_experts else {})


def _rotating(config: _Config, family: Family, source: str) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    num_layers = config.num_hidden_layers
    if family.unrotated_every is None:
        return [True] * num_layers
    if config.no_rope_layers is None:
        every = _or(config.no_rope_layer_interval, family.unrotated_every)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(config.no_rope_layers) < num_layers:
        raise CheckpointError(
            f"{source}: no_rope_layers has {len(config.no_rope_layers)} entries for {num_layers} layers; it should have one "
            "for each, 1 for a layer with a rotary embedding and 0 for one without"
        )
    return [bool(rotates) for rotates in config.no_rope_layers[:num_layers]]


def _ropes_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Fields of the rotary embeddings. That of layers with a window is written apart if the family has one of its own."""
    mixers = [mixer for mixer in config.attention_kinds if mixer.rope.dim] or [config.attention_kinds[0]]
    kinds = {mixer.window is not None: mixer for mixer in reversed(mixers)}
    mixer = kinds.get(False, mixers[0])
    rope, fields = mixer.rope, dict[str, Any]()
    if family.unrotated_every is not None:
        fields["no_rope_layers"] = [int(layer.attention.rope.dim > 0) for layer in config.layers]
    if family.local_theta is None:
        fields["rope_theta"] = rope.theta
    else:
        fields["rope_theta"] = rope.theta if False in kinds else dict(family.defaults)["rope_theta"]
        local = kinds[True].rope.theta if True in kinds else family.local_theta
        fields["rope_local_base_freq"] = local
        # transformers 5 reads the base of OLMo 3's layers with a window from here alone.
        full = {"rope_type": "default"} if rope.scaling is None else _scaling_to_hf(config, rope)
        fields["rope_parameters"] = {
            "full_attention": full | {"rope_theta": fields["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        if False not in kinds:
            return fields
    if rope.dim not in (0, mixer.head_dim) or family.partial_rotary != 1.0:
        fields["partial_rotary_factor"] = rope.dim / mixer.head_dim
    if rope.scaling is not None:
        fields["rope_scaling"] = _scaling_to_hf(config, rope)
    if isinstance(rope.scaling, LongRope):
        fields["original_max_position_embeddings"] = rope.scaling.original_max_position
    elif config.family == "phi3":
        fields["original_max_position_embeddings"] = config.max_position
    return fields


def _rope_and_growth(config: ModelConfig, theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Rope fields with the growth of queries, which transformers reads from there, also if it is 0."""
    mixer = config.attention_kinds[0]
    plain = {"rope_type": "default", "original_max_position_embeddings": mixer.query_period or config.max_position}
    fields = (scaling or plain) | {"rope_theta": theta, "llama_4_scaling_beta": mixer.query_growth}
    if fields.get("attention_factor") == 1.0:  # as published models write it, and as llama.cpp's converter reads it
        fields |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return fields


def _whole(number: float) -> int | float:
    """A number that is whole but for rounding as an int."""
    return round(number) if abs(number - round(number)) < 1e-6 * number else number


def _scaling_to_hf(config: ModelConfig, rope: RopeConfig) -> dict[str, Any]:
    match rope.scaling:
        case Linear(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case Yarn(factor, original, attention_factor, fast, slow, truncate):
            fields = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }
            return fields if attention_factor is None else fields | {"attention_factor": attention_factor}
        case LongRope(short, long, original, factor, attention_factor):
            fields = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
            if config.family == "phi3":
                # transformers 4 insists on exactly these three fields, the first one called `type`.
                fields = {"type": fields.pop("rope_type")} | fields
            else:
                fields["original_max_position_embeddings"] = original
            if factor != config.max_position / original:
                fields["factor"] = factor
            return fields if attention_factor is None else fields | {"attention_factor": attention_factor}
        case scaling:
            raise CheckpointError(f"a config.json cannot express rope scaling {scaling!r}")


def _windows(config: _Config, family: Family, source: str) -> tuple[int | None, ...]:
    window, num_layers = config.given("sliding_window", family.window), config.num_hidden_layers
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if family.windows == "some" and not config.use_sliding_window:
        return (None,) * num_layers
    kinds = config.layer_types
    if kinds is None and family.windows == "pattern":
        every = _or(config.sliding_window_pattern, family.window_every)
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    if kinds is None:
        first = _or(config.max_window_layers, _MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(
            f"{source}: layer_types needs {num_layers} entries full_attention or sliding_attention, got {shortened(kinds)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    windows = {window for window in config.windows if window is not None}
    window = next(iter(windows), None)
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    kinds = [_LAYER_TYPES[w is not None] for w in config.windows]
    if family.windows == "pattern":
        return {"sliding_window": window or family.window, "layer_types": kinds}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": next((i for i, w in enumerate(config.windows) if w is not None), config.num_layers),
        "layer_types": kinds,
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
