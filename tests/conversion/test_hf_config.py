"""`config.json` to `ModelConfig` and back."""

import dataclasses
import functools
from typing import Any

import pytest
from checkpoints import HF_CONFIG
from oracles import ARCHITECTURES, SIZES

from kvjax.config import Linear, Llama3, LongRope, ModelConfig, Yarn
from kvjax.conversion import CheckpointError, from_hf, gguf_file, to_hf
from kvjax.conversion.config_json import config_from_json, config_to_json
from kvjax.conversion.hf_config import FAMILIES
from kvjax.conversion.refused import REFUSED

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}
GLM = {"model_type": "glm", "head_dim": 8, "eos_token_id": [1, 2]}

GLM4_MOE = {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16, "rope_theta": 1e6}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3.5": {"model_type": "qwen3_5_text", "head_dim": 16, "full_attention_interval": 2, "linear_key_head_dim": 8},
    "qwen3-next": {
        "model_type": "qwen3_next",
        "head_dim": 16,
        "layer_types": ["full_attention", "linear_attention"],
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
    },
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-3.1": {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 8.0}},
    "tied": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 16, "head_dim": 10},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen2-windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "attention_bias": True},
    "phi3": {"model_type": "phi3", "sliding_window": 20, "rope_scaling": None},
    "phi3-long": {
        "model_type": "phi3",
        "original_max_position_embeddings": 32,
        "rope_scaling": LONG | {"type": "longrope"},
    },
    "phi4-mini": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 3.0]},
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5},
    "smollm3-list": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "granite": {"model_type": "granite", "attention_multiplier": 0.015625, "logits_scaling": 8, "mlp_bias": True},
    "granite-plain": {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "ministral3": {"model_type": "ministral3", "head_dim": 8},
    "ministral3-plain": {
        "model_type": "ministral3",
        "head_dim": 8,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm": GLM,
    "glm4": GLM | {"model_type": "glm4", "attention_bias": False},
    "qwen3-moe": EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3-moe-mixed": EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "qwen2-moe": EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "olmo2": {"model_type": "olmo2", "attention_bias": True},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 16, "rope_theta": 500000.0},
    "olmo3-windows": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}},
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 16},
    "glm4-moe": GLM4_MOE,
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16},
    "gpt-oss-plain": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "glm4-moe-only": GLM4_MOE | {"first_k_dense_replace": 0, "use_qk_norm": True, "n_shared_experts": 0},
    "gemma3": GEMMA3,
    "gemma3-4b": GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "attention_bias": True},
    "gemma3-27b": GEMMA3 | {"query_pre_attn_scalar": 10, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    "gemma3-windows": GEMMA3 | {"layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": False},
    "gemma3-full": GEMMA3 | {"layer_types": ["full_attention"] * 2},
}

CONFIGS = {name: HF_CONFIG | fields for name, fields in VARIANTS.items()} | {
    f"oracle-{name}": SIZES | {"model_type": kind} | fields for name, (kind, fields) in ARCHITECTURES.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trips(name: str) -> None:
    config = from_hf(CONFIGS[name])
    assert from_hf(to_hf(config)) == config
    assert config_from_json(config_to_json(config), "kvjax.json") == config


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_is_written(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = from_hf(CONFIGS[name])
    fields = to_hf(config)
    theirs = transformers.AutoConfig.for_model(**fields)
    assert from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize(
    "name", [name for name, fields in VARIANTS.items() if "rope_scaling" in fields and "gemma" not in name]
)
def test_both_spellings_of_rope_agree(name: str) -> None:
    old = HF_CONFIG | VARIANTS[name]
    scaling = dict(old["rope_scaling"] or {"type": "default"})
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": scaling.pop("type", None) or "llama3"} | scaling
    assert from_hf(new) == from_hf(old)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", Yarn(4.0, 32, attention_factor=0.7)),
        ("llama", LongRope((1.0,) * 4, (2.0,) * 4, 32, factor=3.0)),
        ("llama", LongRope((1.0,) * 4, (2.0,) * 4, 32, factor=4.0, attention_factor=1.3)),
        ("phi3", LongRope((1.0,) * 4, (2.0,) * 4, 32, factor=4.0)),
    ],
)
def test_scalings_are_written_with_all_that_they_have(family: str, scaling: Any) -> None:
    config = from_hf(HF_CONFIG | VARIANTS["phi3" if family == "phi3" else "llama"])
    config = dataclasses.replace(config, max_position=128)
    config = config.with_attention(rope=dataclasses.replace(config.rope, scaling=scaling))
    fields = to_hf(config)
    assert from_hf(fields) == config
    assert ("factor" in fields["rope_scaling"]) == (scaling.factor != 128 / 32 or isinstance(scaling, Yarn))


@pytest.mark.parametrize(
    ("family", "epsilon"),
    [("llama", 1e-6), ("mistral", 1e-6), ("qwen2", 1e-6), ("qwen3", 1e-6), ("phi3", 1e-5), ("glm", 1.5625e-7)],
)
def test_what_families_imply_of_norms(family: str, epsilon: float) -> None:
    """Where config.json is silent, transformers' defaults."""
    fields = {key: value for key, value in (HF_CONFIG | VARIANTS[family]).items() if key != "rms_norm_eps"}
    assert from_hf(fields).norm_eps == epsilon


def with_windows(config: ModelConfig, windows: tuple[int | None, ...]) -> ModelConfig:
    """The model with these windows, one per layer."""
    mixers = (dataclasses.replace(layer.mixer, window=w) for layer, w in zip(config.layers, windows, strict=True))
    layers = (dataclasses.replace(a, mixer=b) for a, b in zip(config.layers, mixers, strict=True))
    return dataclasses.replace(config, layers=tuple(layers))


def test_windows_are_written_for_readers_old_and_new() -> None:
    """By layer, and for those who know no `layer_types` by the first layer that has one, from which on all have."""
    for windows, first in (((None, 16), 1), ((16, 16), 0), ((None, None), 2)):
        config = with_windows(from_hf(HF_CONFIG | VARIANTS["qwen2"]), windows)
        fields = to_hf(config)
        assert fields["max_window_layers"] == first
        del fields["layer_types"]
        assert from_hf(fields) == config


def test_fields_land_where_they_belong() -> None:
    config = from_hf(HF_CONFIG | {"rope_theta": 5e5, "eos_token_id": [1, 7]}, {"eos_token_id": 9})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.rope.theta, config.rope.dim, config.rope.interleaved) == (5e5, 8, False)
    assert config.norm_eps == 1e-5
    assert config.bos == 0
    assert config.eos == (9,), "generation_config.json has the last word"
    assert from_hf(HF_CONFIG | {"eos_token_id": [1, 7]}, {"max_new_tokens": 5}).eos == (1, 7)
    assert from_hf(HF_CONFIG | {"eos_token_id": None}).eos == ()


def test_families_differ_as_they_should() -> None:
    def config(name: str) -> Any:
        return from_hf(HF_CONFIG | VARIANTS[name])

    assert config("mistral").windows == (16, 16)
    assert config("mistral-full").windows == (None, None)
    assert config("qwen2").windows == (None, None)
    assert config("qwen2-windows").windows == (None, 16)
    layered = VARIANTS["qwen2-windows"] | {"layer_types": ["sliding_attention", "full_attention"]}
    assert from_hf(HF_CONFIG | layered).windows == (16, None)
    assert (config("qwen2").qkv_bias, config("qwen2").output_bias) == (True, False)
    assert (config("llama-biased").qkv_bias, config("llama-biased").output_bias) == (True, True)
    assert config("qwen3").qk_norm
    assert config("qwen3").head_dim == 128
    assert config("glm").rope.interleaved
    assert (config("glm").rope.dim, config("glm").qkv_bias, config("glm").output_bias) == (4, True, False)
    assert config("glm4").layers[0].norms == "both"
    assert not config("glm4").qkv_bias
    assert config("phi4-mini").rope.dim == 4


def test_scalings() -> None:
    def scaling(name: str) -> Any:
        return from_hf(HF_CONFIG | VARIANTS[name]).rope.scaling

    assert scaling("llama-3.1") == Llama3(8.0, 1.0, 4.0, 64)
    assert scaling("linear") == Linear(8.0)
    assert scaling("qwen2-yarn") == Yarn(4.0, 32)
    assert scaling("phi3-long") == LongRope((1.0, 1.5, 2.0, 2.5), (1.0, 3.0, 5.0, 7.0), 32, factor=128 / 32)
    # The name that the first Phi-3 checkpoints used.
    early = VARIANTS["phi3-long"] | {"rope_scaling": LONG | {"type": "su"}}
    assert from_hf(HF_CONFIG | early).rope.scaling == scaling("phi3-long")
    # DeepSeek's refinement of YaRN: equal scales cancel out.
    refined = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    assert from_hf(HF_CONFIG | {"rope_scaling": refined}).rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "unknown model_type 'gpt_neox'; supported are llama, mistral"),
        ({"model_type": None}, "unknown model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported are silu and swish"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised with 'hqq'"),
        ({"hidden_size": None}, "hidden_size is None; it should be a valid integer"),
        ({"vocab_size": "300"}, "vocab_size is '300'; it should be a valid integer"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "unsupported rope type 'dynamic'; supported are default",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs a number low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' needs a number factor"),
        ({"rope_scaling": {"type": None, "factor": 2.0}}, "type of a rotary embedding is null"),
        ({"rope_parameters": {"rope_type": None, "factor": 2.0}}, "rope_type of a rotary embedding is null"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor has 1 numbers; give one for each of 4 rotated pairs",
        ),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"]},
            "layer_types needs 2 entries",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types needs 2 entries full_attention or linear_attention",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 2},
            "no layer has attention; at least one layer must have keys and values to cache",
        ),
    ],
)
def test_says_what_it_cannot_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf(HF_CONFIG | change, source="somewhere/config.json")


LEAST = {
    "vocab_size": 160000,
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
}
"""What every family has to say."""


@pytest.mark.oracle
@pytest.mark.parametrize("change", [{}, {"use_sliding_window": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_are_read_as_transformers_reads_them(family: str, change: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    fields = LEAST | {"model_type": family} | change
    if change and family in ("qwen2_moe", "qwen3_moe", "smollm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        with pytest.raises(CheckpointError, match=f"use_sliding_window of a {family} model is not supported"):
            from_hf(fields)
        return
    config = from_hf(fields)
    theirs = transformers.AutoConfig.for_model(**fields)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.tied == theirs.tie_word_embeddings
    assert config.bos == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert config.eos == (() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))
    rotates = getattr(theirs, "no_rope_layers", [1] * 30)
    for i in config.cached:
        mixer = config.layers[i].attention
        kind = "full_attention" if mixer.window is None else "sliding_attention"
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        share = rope.get("partial_rotary_factor", 1.0)
        assert (mixer.rope.theta, mixer.rope.dim) == (rope["rope_theta"], mixer.head_dim * share * rotates[i])
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    assert config.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert config.cached == tuple(i for i, kind in enumerate(kinds) if kind != "linear_attention")
    for mixer in config.recurrent_kinds:
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
        assert dataclasses.astuple(mixer) == tuple(getattr(theirs, f"linear_{name}") for name in names)
    if change and FAMILIES[family].windows == "some":
        assert config.windows == (None,) * 28 + (4096,) * 2
    if family in ("llama", "qwen2", "qwen3", "phi3"):  # others refuse null
        theirs = transformers.AutoConfig.for_model(**fields, num_key_value_heads=None)
        assert from_hf(fields | {"num_key_value_heads": None}).num_kv_heads == theirs.num_key_value_heads == 32


def test_tokens_of_the_family() -> None:
    """They are taken where a key is missing and the vocabulary has them; null is none."""
    silent = {key: value for key, value in HF_CONFIG.items() if "token_id" not in key}
    assert (from_hf(silent).eos, from_hf(silent).bos) == ((2,), 1)
    assert (from_hf(silent | {"vocab_size": 2}).eos, from_hf(silent | {"vocab_size": 1}).bos) == ((), None)
    config = from_hf(silent | {"bos_token_id": None, "eos_token_id": None})
    assert (config.eos, config.bos) == ((), None)
    assert from_hf(silent, {"eos_token_id": [3, 4]}).eos == (3, 4)


FULL = {"rope_type": "default", "rope_theta": 1e6}
SLIDING = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
WINDOWS = VARIANTS["qwen2-windows"]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_of_each_kind_of_layers(key: str) -> None:
    """What transformers nests is read where one rotary embedding is that of all layers; nothing is passed over."""
    without = {name: value for name, value in (HF_CONFIG | VARIANTS["qwen2"]).items() if name != "rope_theta"}
    both = {"full_attention": FULL, "sliding_attention": SLIDING}
    assert from_hf(without | {key: both}).rope.theta == 1e6, "no layer has a window"
    assert from_hf(without | {key: {"full_attention": FULL}}).rope.theta == 1e6
    same = dict.fromkeys(both, FULL)
    assert from_hf(without | WINDOWS | {key: same}).rope.theta == 1e6
    for nested, message in (
        (both, r"rope_parameters of full_attention and sliding_attention differ; a qwen2 model has one"),
        ({"full_attention": FULL}, rf"{key} has no object for sliding_attention, but the model has such layers"),
        ({"main": FULL}, rf"{key} has objects under main; it should have the parameters of all layers, or one object"),
        ({"default": FULL, "full_attention": FULL}, rf"{key} has objects under default, full_attention"),
        (both | {"rope_theta": 1e4}, rf"{key} has objects under full_attention, sliding_attention"),
        (FULL | {"rope_parameters": FULL}, rf"{key} has objects under rope_parameters"),
        (both | {"sliding_attention": SLIDING | {"factor": "2"}}, rf"{key}.sliding_attention.factor is '2'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            from_hf(without | WINDOWS | {key: nested})


def test_gemma_3_is_read_as_published() -> None:
    """The 270M model's config.json has no field for what transformers defaults to; each layer knows what it is."""
    config = from_hf({"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "sliding_window": 512})
    assert config.windows == (*[512] * 5, None) * 3
    local, full = config.kinds
    assert (local.mixer.rope.theta, full.mixer.rope.theta) == (1e4, 1e6)
    assert (local.mixer.num_heads, local.mixer.num_kv_heads, local.mixer.head_dim) == (8, 4, 256)
    assert (local.mixer.scale, local.mixer.qk_norm, local.norms, local.mlp.activation) == (
        None,
        True,
        "both",
        "gelu_tanh",
    )
    assert (config.norm_offset, config.tied, config.embed_scale) == (1.0, True, 640**0.5)
    assert (config.vocab_size, config.context_length, config.eos, config.bos) == (262208, 131072, (1,), 2)


def test_gemma_3_27b_has_a_scale_of_its_own() -> None:
    fields = {"model_type": "gemma3_text", "head_dim": 128, "query_pre_attn_scalar": 168}
    config = from_hf(fields | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    local, full = config.kinds
    assert local.mixer.logit_scale == full.mixer.logit_scale == 168**-0.5
    assert (local.mixer.rope.scaling, full.mixer.rope.scaling) == (None, Linear(8.0))
    assert config.context_length == 131072, "max_position counts the scaling already, which layers with windows lack"


def test_layers_without_rotation() -> None:
    """Each fourth one by default; scaling, which they lack, still extends the context."""
    fields = HF_CONFIG | {"model_type": "smollm3", "num_hidden_layers": 8}
    config = from_hf(
        fields | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}
    )
    assert [layer.mixer.rope.dim for layer in config.layers] == [8, 8, 8, 0] * 2
    assert config.context_length == 512
    assert from_hf(fields | {"no_rope_layers": [0] * 8}).context_length == 128
    assert from_hf(fields | {"no_rope_layer_interval": 2}).layers[1].mixer.rope.dim == 0
    with pytest.raises(CheckpointError, match="no_rope_layers has 1 entries for 8 layers; it should have one for each"):
        from_hf(fields | {"no_rope_layers": [1]})
    with pytest.raises(CheckpointError, match="use_sliding_window of a smollm3 model is not supported"):
        from_hf(fields | {"use_sliding_window": True})


def test_the_text_part_of_a_multimodal_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 6}
    whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {"hidden_size": 5}}
    assert from_hf(whole) == dataclasses.replace(from_hf(text), eos=(1, 106))
    with pytest.raises(CheckpointError, match="text_config is None; a gemma3 model needs an object there"):
        from_hf({"model_type": "gemma3"})


def test_the_text_part_of_mistral_small_3() -> None:
    """It is a Mistral, or a Ministral 3 whose queries grow with their position."""
    text = HF_CONFIG | {"head_dim": 8, "sliding_window": None}
    mistral = {"model_type": "mistral3", "text_config": text | {"model_type": "mistral"}}
    assert from_hf(mistral) == from_hf(text | {"model_type": "mistral"})
    ministral = from_hf({"model_type": "mistral3", "text_config": text | {"model_type": "ministral3"}})
    mixer = ministral.layers[0].mixer
    assert (ministral.family, mixer.query_growth, mixer.query_period) == ("ministral3", 0.1, 16384)
    assert mixer.rope.scaling == Yarn(16.0, 16384, attention_factor=1.0)
    with pytest.raises(CheckpointError, match=r"text_config.model_type is 'mamba'; supported in a mistral3 model are"):
        from_hf({"model_type": "mistral3", "text_config": text | {"model_type": "mamba"}})
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta of a llama model is not supported"):
        from_hf(HF_CONFIG | {"rope_parameters": rope})
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta needs original_max_position_embeddings"):
        from_hf(text | {"model_type": "ministral3", "rope_parameters": rope})


def test_the_text_part_of_qwen3_vl() -> None:
    """It is a Qwen3, with another default base, and a head that the whole model ties."""
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = HF_CONFIG | {"model_type": "qwen3_vl_text", "rope_scaling": rope}
    del text["rope_theta"]
    whole = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text, "vision_config": {"depth": 5}}
    config = from_hf(whole)
    assert config == from_hf(HF_CONFIG | {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 500000.0})
    assert from_hf(text) == dataclasses.replace(config, tied=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported are gelu_pytorch_tanh"),
        ({"layer_types": ["chunked_attention"]}, "layer_types needs 26 entries"),
    ],
)
def test_what_gemma_3_cannot_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf({"model_type": "gemma3_text"} | change)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "attention logits are capped"),
        ("deepseek_v3", r"multi-head latent attention \(MLA\) is not implemented"),
        ("falcon_h1", "its layers without attention are not implemented"),
        ("gemma4", "heads of several sizes"),
    ],
)
def test_families_that_are_refused_have_a_reason(family: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"unknown model_type '{family}'.* It is not supported because {reason}"):
        from_hf({"model_type": family})


def test_no_supported_family_is_refused() -> None:
    assert not REFUSED.keys() & {*FAMILIES, *gguf_file.ARCHITECTURES}


def test_floats_for_lengths() -> None:
    """Of rotary embeddings, which transformers only computes with; it refuses other floats for integers, and so does kvjax."""
    for kind, fields in (("llama3", LLAMA3), ("yarn", {"factor": 4.0})):
        scaling = fields | {"rope_type": kind, "original_max_position_embeddings": 64.0}
        found = from_hf(HF_CONFIG | {"rope_scaling": scaling})
        assert found == from_hf(HF_CONFIG | {"rope_scaling": scaling | {"original_max_position_embeddings": 64}})
        assert isinstance(found.rope.scaling.original_max_position, int)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    for change, message in (
        ({"max_position_embeddings": 128.5}, "max_position_embeddings is 128.5; it should be a valid integer"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0; it should be a valid integer"),
        ({"eos_token_id": 1.0}, r"eos_token_id.0 is 1.0; it should be a valid integer"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id.1 is -1; it should be greater than or equal to 0"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1; it should be greater than 0"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64.5}}, r"rope_scaling.*is 64.5; it should be"),
    ):
        with pytest.raises(CheckpointError, match=message):
            from_hf(HF_CONFIG | change)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 128),
        ({"type": "linear", "factor": 8.0}, 1024),
        ({"type": "linear", "factor": 0.5}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # Qwen2.5
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),  # DeepSeek
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        (LLAMA3 | {"type": "llama3"}, 128),
        (LONG | {"type": "longrope", "original_max_position_embeddings": 32}, 128),
        ({"type": "linear", "factor": 1e9}, 2**31 - 1),
    ],
)
def test_windows_with_their_scaling(scaling: dict[str, Any] | None, expected: int) -> None:
    config = from_hf(HF_CONFIG | {"rope_scaling": scaling})
    assert (config.context_length, config.max_position) == (expected, 128)
    assert config_from_json(config_to_json(config), "kvjax.json").context_length == expected


def test_says_what_it_cannot_write() -> None:
    config = from_hf(HF_CONFIG)
    with pytest.raises(CheckpointError, match=r"a llama config.json cannot express output_bias=False"):
        to_hf(config.with_attention(qkv_bias=True))
    with pytest.raises(CheckpointError, match="cannot write family 'mamba'"):
        to_hf(dataclasses.replace(config, family="mamba"))


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ((), {"experts": 8}, "unknown fields experts of ModelConfig; a newer kvjax may have written them"),
        (("kinds", 0, "mixer"), {"caps": True}, "unknown fields caps of AttentionConfig; a newer kvjax"),
        (("kinds", 0, "mixer"), {"type": "Mamba"}, "unknown mixer 'Mamba'; known are AttentionConfig"),
        (("kinds", 0, "mixer"), {"rope": {"theta": 1e4, "dim": 8}}, "fields interleaved of RopeConfig are missing"),
        (
            ("kinds", 0, "mixer", "rope"),
            {"scaling": {"type": "Fancy"}},
            "unknown rope scaling 'Fancy'; known are Linear",
        ),
        (("kinds", 0, "mixer"), {"num_kv_heads": 3}, "kvjax.json: num_heads=4 is not a multiple"),
        (("kinds", 0), {"norms": "none"}, "LayerConfig.norms is 'none'"),
        ((), {"layers": [0, 1]}, "layers has index 1, but kinds has 1 entries"),
        ((), {"layers": []}, "num_layers=0 must be at least 1"),
    ],
)
def test_own_json_is_strict(key: tuple[Any, ...], change: dict[str, Any], message: str) -> None:
    fields = config_to_json(from_hf(HF_CONFIG))
    part = functools.reduce(lambda each, name: each[name], key, fields)
    part |= change
    with pytest.raises(CheckpointError, match=message):
        config_from_json(fields, "kvjax.json")


VERSION_1 = {
    "family": "qwen2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 128,
    "rope": {
        "theta": 1e4,
        "dim": 8,
        "interleaved": False,
        "scaling": {
            "type": "Yarn",
            "factor": 4.0,
            "original_max_position": 32,
            "attention_factor": None,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
    },
    "norm_eps": 1e-06,
    "tied": True,
    "qkv_bias": True,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "sandwich_norms": False,
    "windows": [None, 16],
    "eos": [2, 3],
    "bos": None,
}
"""What the first version wrote."""


def test_own_json_of_the_first_version_is_read() -> None:
    config = config_from_json(VERSION_1, "kvjax.json", version=1)
    assert config.windows == (None, 16)
    assert (config.rope.scaling, config.qkv_bias, config.eos) == (Yarn(4.0, 32), True, (2, 3))
    assert config_from_json(config_to_json(config), "kvjax.json") == config
    with pytest.raises(CheckpointError, match=r"num_heads is 4\.0; it should be a valid integer"):
        config_from_json(VERSION_1 | {"num_heads": 4.0}, "kvjax.json", version=1)
    with pytest.raises(CheckpointError, match="fields eos of ModelConfig are missing"):
        config_from_json({key: value for key, value in VERSION_1.items() if key != "eos"}, "kvjax.json", version=1)
