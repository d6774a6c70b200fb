"""Hugging Face `config.json` to `ModelConfig` and back.

Both spellings of rotary embeddings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). The first is written, since every version reads it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.rope import Linear, Llama3, LongRope, RopeConfig, RopeScaling, Yarn

from .errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Family:
    """What a `model_type` implies where its config.json is silent, and how its checkpoints are laid out.

    Attributes:
        architecture: class name in transformers.
        norm_eps: default of `rms_norm_eps`.
        head_dim: default of `head_dim`; None is hidden_size / num_attention_heads.
        partial_rotary: default share of a head's channels that rotate.
        interleaved: rotary pairs are neighbouring channels.
        qkv_bias: True or False where fixed, None where `attention_bias` decides.
        default_bias: `attention_bias` where absent.
        output_bias: whether `attention_bias` also adds one after attention.
        mlp_bias: whether `mlp_bias` is honoured.
        qk_norm, sandwich_norms: as in `ModelConfig`.
        windows: which layers `sliding_window` concerns: "none", "all", or "some" (`layer_types` or `max_window_layers`).
        fused_qkv, fused_gate_up: projections that the checkpoint stores stacked in one tensor.
    """

    architecture: str
    norm_eps: float = 1e-6
    head_dim: int | None = None
    partial_rotary: float = 1.0
    interleaved: bool = False
    qkv_bias: bool | None = False
    default_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    windows: str = "none"
    fused_qkv: bool = False
    fused_gate_up: bool = False


_GLM = Family(
    "GlmForCausalLM",
    norm_eps=1.5625e-7,
    head_dim=128,
    partial_rotary=0.5,
    interleaved=True,
    qkv_bias=None,
    default_bias=True,
    fused_gate_up=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, output_bias=True, mlp_bias=True),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="some"),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, qkv_bias=None, output_bias=True, qk_norm=True, windows="some"),
    "phi3": Family("Phi3ForCausalLM", norm_eps=1e-5, windows="all", fused_qkv=True, fused_gate_up=True),
    "glm": _GLM,
    "glm4": dataclasses.replace(_GLM, architecture="Glm4ForCausalLM", sandwich_norms=True),
}
"""Supported `model_type`s."""

_PHI3_ORIGINAL_MAX_POSITION = 4096
"""What `original_max_position_embeddings` is where a Phi-3 configuration does not say."""


def from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> ModelConfig:
    """Read the contents of a `config.json`.

    Args:
        config: its parsed contents.
        generation_config: contents of `generation_config.json`; its `eos_token_id` wins where present.
        source: file name for error messages.

    Raises:
        CheckpointError: unknown architecture, activation or rope type; quantised weights; a missing or impossible value.
    """
    family_name = config.get("model_type")
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        raise CheckpointError(f"{source}: unknown model_type {family_name!r}; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[family_name]
    _refuse_unsupported(config, source)

    def required(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{source}: {key} is {value!r}, a positive integer was expected")
        return value

    num_heads, hidden_size, num_layers = (
        required(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = config.get("head_dim") or family.head_dim or hidden_size // num_heads
    max_position = required("max_position_embeddings")
    bias = _or(config.get("attention_bias"), family.default_bias)
    eos = (generation_config or {}).get("eos_token_id")
    try:
        return ModelConfig(
            family=family_name,
            vocab_size=required("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=required("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position=max_position,
            rope=_rope(config, family, head_dim, max_position, source),
            norm_eps=float(_or(config.get("rms_norm_eps"), family.norm_eps)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias and family.output_bias,
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sandwich_norms=family.sandwich_norms,
            windows=_windows(config, family, num_layers, source),
            eos=_ids(_or(eos, config.get("eos_token_id"))),
            bos=next(iter(_ids(config.get("bos_token_id"))), None),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of a `config.json` that transformers and `from_hf` both read as this model.

    Raises:
        CheckpointError: the family's checkpoints cannot express the configuration.
    """
    if config.family not in FAMILIES:
        raise CheckpointError(f"cannot write family {config.family!r}; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[config.family]
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else list(config.eos) or None,
        "rope_theta": config.rope.theta,
    }
    # Transformers pads with Phi-3's default id unless told otherwise, and refuses one beyond the vocabulary.
    fields["pad_token_id"] = config.eos[0] if config.eos else None
    if config.rope.dim != config.head_dim or family.partial_rotary != 1.0:
        fields["partial_rotary_factor"] = config.rope.dim / config.head_dim
    if config.rope.scaling is not None:
        fields["rope_scaling"] = _scaling_to_hf(config)
    if isinstance(config.rope.scaling, LongRope):
        fields["original_max_position_embeddings"] = config.rope.scaling.original_max_position
    elif config.family == "phi3":
        fields["original_max_position_embeddings"] = config.max_position
    if family.qkv_bias is None:
        fields["attention_bias"] = config.qkv_bias
    if family.mlp_bias:
        fields["mlp_bias"] = config.mlp_bias
    fields |= _windows_to_hf(config, family)
    if from_hf(fields) != config:
        differing = [
            f.name for f in dataclasses.fields(config) if getattr(from_hf(fields), f.name) != getattr(config, f.name)
        ]
        raise CheckpointError(
            f"a {config.family} config.json cannot express {', '.join(f'{n}={getattr(config, n)!r}' for n in differing)}"
        )
    return fields


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    activation = _or(config.get("hidden_act"), "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{source}: hidden_act is {activation!r}; supported are silu and swish")
    quantization = config.get("quantization_config")
    if quantization:
        raise CheckpointError(
            f"{source}: weights are quantised with {quantization.get('quant_method', 'an unnamed method')!r}; "
            "load the unquantised checkpoint or a GGUF file instead"
        )


def _rope(config: Mapping[str, Any], family: Family, head_dim: int, max_position: int, source: str) -> RopeConfig:
    rope = dict(_or(config.get("rope_scaling"), config.get("rope_parameters")) or {})
    # `rope_scaling` wins over `rope_parameters`, but the base may stand in either or beside them.
    theta = _first(
        rope.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta"), config.get("rope_theta")
    )
    share = _first(rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"), family.partial_rotary)
    dim = int(head_dim * share)
    return RopeConfig(
        theta=float(_or(theta, 10000.0)),
        dim=dim,
        interleaved=family.interleaved,
        scaling=_scaling(rope, config, dim, max_position, source),
    )


def _scaling(
    rope: Mapping[str, Any], config: Mapping[str, Any], dim: int, max_position: int, source: str
) -> RopeScaling | None:
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    phi3 = config.get("model_type") == "phi3"
    if phi3 and kind in ("su", "yarn"):  # names that early Phi-3 checkpoints gave to LongRoPE
        kind = "longrope"
    # Phi-3 keeps the original window beside the rope fields, and there it has the last word.
    original = _first(
        config.get("original_max_position_embeddings"),
        rope.get("original_max_position_embeddings"),
        _PHI3_ORIGINAL_MAX_POSITION if phi3 else max_position,
    )
    factor = rope.get("factor")

    def number(key: str) -> float:
        if not isinstance(rope.get(key), int | float):
            raise CheckpointError(f"{source}: rope type {kind!r} needs a number {key}, got {rope.get(key)!r}")
        return float(rope[key])

    match kind:
        case "default":
            return None
        case "linear":
            return Linear(number("factor"))
        case "llama3":
            return Llama3(number("factor"), number("low_freq_factor"), number("high_freq_factor"), int(original))
        case "yarn":
            factor = float(_or(factor, max_position / original))
            return Yarn(
                factor=factor,
                original_max_position=int(original),
                attention_factor=_yarn_attention_factor(rope, factor),
                beta_fast=float(rope.get("beta_fast") or 32.0),
                beta_slow=float(rope.get("beta_slow") or 1.0),
                truncate=bool(rope.get("truncate", True)),
            )
        case "longrope":
            return LongRope(
                short_factor=_channel_factors(rope, "short_factor", dim, source),
                long_factor=_channel_factors(rope, "long_factor", dim, source),
                original_max_position=int(original),
                factor=float(_or(factor, max_position / original)),
                attention_factor=rope.get("attention_factor"),
            )
    raise CheckpointError(
        f"{source}: unsupported rope type {kind!r}; supported are default, linear, llama3, yarn and longrope"
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The factor on cosine and sine; None leaves YaRN's own. `mscale` fields are DeepSeek's refinement of it."""
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if not (mscale and mscale_all) or factor <= 1:
        return None
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all * math.log(factor) + 1.0)


def _channel_factors(rope: Mapping[str, Any], key: str, dim: int, source: str) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != dim // 2:
        got = len(factors) if isinstance(factors, list | tuple) else factors
        raise CheckpointError(f"{source}: {key} needs {dim // 2} numbers, one for each rotated pair, got {got!r}")
    return tuple(float(factor) for factor in factors)


def _scaling_to_hf(config: ModelConfig) -> dict[str, Any]:
    match config.rope.scaling:
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
    raise CheckpointError(f"a config.json has no word for rope scaling {config.rope.scaling!r}")


def _windows(config: Mapping[str, Any], family: Family, num_layers: int, source: str) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = _or(config.get("max_window_layers"), num_layers)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(
            f"{source}: layer_types needs {num_layers} entries full_attention or sliding_attention, got {kinds!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    windows = {window for window in config.windows if window is not None}
    window = next(iter(windows), None)
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": next((i for i, w in enumerate(config.windows) if w is not None), config.num_layers),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
    }


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
