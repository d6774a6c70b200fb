"""Configurations of well-known models, for benchmarks and memory plans that need no weights."""

import dataclasses

from .model import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig
from .rope import Llama3, RopeConfig, Yarn

_GPT_OSS = LayerConfig(
    AttentionConfig(
        64,
        8,
        64,
        RopeConfig(theta=150000.0, dim=64, scaling=Yarn(32.0, 4096, truncate=False)),
        qkv_bias=True,
        output_bias=True,
        sinks=True,
    ),
    MoEConfig(experts=32, per_token=4, width=2880, bias=True, activation="clamped_swiglu"),
)

PRESETS = {
    "llama-3.1-8b": ModelConfig.uniform(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        rope=RopeConfig(theta=500000.0, dim=128, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    ),
    "llama-3.1-70b": ModelConfig.uniform(
        family="llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        rope=RopeConfig(theta=500000.0, dim=128, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    ),
    "llama-2-7b": ModelConfig.uniform(
        family="llama",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_position=4096,
        rope=RopeConfig(theta=10000.0, dim=128),
    ),
    "qwen2.5-7b": ModelConfig.uniform(
        family="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_position=32768,
        rope=RopeConfig(theta=1000000.0, dim=128),
        norm_eps=1e-6,
        qkv_bias=True,
    ),
    "qwen3-32b": ModelConfig.uniform(
        family="qwen3",
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0, dim=128),
        norm_eps=1e-6,
        qk_norm=True,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        layers=(
            LayerConfig(
                AttentionConfig(32, 4, 128, RopeConfig(theta=1000000.0, dim=128), qk_norm=True),
                MoEConfig(experts=128, per_token=8, width=768),
            ),
        )
        * 48,
        max_position=40960,
        norm_eps=1e-6,
    ),
    "qwen3.5-9b": ModelConfig(
        family="qwen3_5_text",
        vocab_size=248320,
        hidden_size=4096,
        layers=(
            *[LayerConfig(DeltaNetConfig(16, 32, key_dim=128, value_dim=128), MLPConfig(12288))] * 3,
            LayerConfig(
                AttentionConfig(16, 4, 256, RopeConfig(theta=10000000.0, dim=64), qk_norm=True, gated=True),
                MLPConfig(12288),
            ),
        )
        * 8,
        max_position=262144,
        norm_eps=1e-6,
        norm_offset=1.0,
    ),
    "gpt-oss-20b": ModelConfig(
        family="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        layers=(dataclasses.replace(_GPT_OSS, mixer=dataclasses.replace(_GPT_OSS.mixer, window=128)), _GPT_OSS) * 12,
        max_position=131072,
        norm_offset=0.0,
    ),
    "smollm2-135m": ModelConfig.uniform(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope=RopeConfig(theta=100000.0, dim=64),
        tied=True,
    ),
}
"""Configurations by name."""

_HUB = {
    "meta-llama/llama-3.1-8b": "llama-3.1-8b",
    "meta-llama/llama-3.1-70b": "llama-3.1-70b",
    "meta-llama/llama-2-7b": "llama-2-7b",
    "qwen/qwen2.5-7b": "qwen2.5-7b",
    "qwen/qwen3-32b": "qwen3-32b",
    "qwen/qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen/qwen3.5-9b": "qwen3.5-9b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "huggingfacetb/smollm2-135m": "smollm2-135m",
}
"""Presets by Hugging Face hub id of the base model, in lower case."""


def find_preset(name: str) -> ModelConfig | None:
    """Configuration by preset name or hub id, of base or instruction-tuned models; None if there is none."""
    base = name.lower()
    for ending in ("-instruct", "-hf", "-chat"):
        base = base.removesuffix(ending)
    return PRESETS.get(_HUB.get(base, base))
