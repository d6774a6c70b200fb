"""Parameters from and to the trees of tunix, gemma and MaxText, against trees that are written out by hand."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_writers
from checkpoints import weights, write_hf
from flax import linen, nnx

import kvjax
from kvjax.conversion import CheckpointError, from_hf, quantize_weights
from kvjax.conversion.tree_config import MAX_POSITION, tree_config
from kvjax.models import Params, init

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = SIZES | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama"},
    "llama-3.1": SIZES | {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": None},
    "qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3"},
    "qwen3-moe": SIZES | EXPERTS | {"model_type": "qwen3_moe"},
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma3": GEMMA,
    "gemma3-mha": GEMMA | {"num_key_value_heads": 4, "num_hidden_layers": 1},
}
Writer = Callable[[dict[str, np.ndarray], dict[str, Any]], dict[str, Any]]
WRITERS: dict[str, Writer] = {
    "tunix": tree_writers.tunix,
    "tunix gemma": tree_writers.tunix_gemma,
    "gemma": tree_writers.gemma,
    "maxtext": lambda state, config: tree_writers.maxtext(state, config, stacked=True),
    "maxtext apart": lambda state, config: tree_writers.maxtext(state, config, stacked=False),
}
CASES = [
    *(("tunix", name) for name in ("llama", "llama-3.1", "qwen2", "qwen3")),
    *(("tunix gemma", name) for name in ("gemma3", "gemma3-mha")),
    *(("gemma", name) for name in ("gemma3", "gemma3-mha")),
    *(("maxtext", name) for name in ("llama", "llama-3.1", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral")),
    *(("maxtext apart", name) for name in ("llama-3.1", "qwen3-moe")),
]


def written(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that is written to a folder, with one matrix for each expert."""
    config = from_hf(CONFIGS[name])
    tensors: dict[str, np.ndarray] = {}
    for tensor, value in weights(config).items():
        before, experts, after = tensor.partition(".experts.")
        parts = np.split(value, config.layers[0].mlp.experts) if experts else []
        tensors |= {f"{before}.experts.{e}.{after}": part for e, part in enumerate(parts)} or {tensor: value}
    return write_hf(folder, CONFIGS[name], tensors)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_a_tree_gives_the_parameters_of_the_checkpoint(library: str, name: str, tmp_path: Path) -> None:
    tree = WRITERS[library](written(name, tmp_path), CONFIGS[name])
    loaded, layout = kvjax.load(tmp_path), library.split()[0]
    made = Params.from_tree(tree, layout, loaded.config)
    jax.tree.map(np.testing.assert_array_equal, made, loaded)
    back = made.to_tree(layout, stacked=library != "maxtext apart")
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("maxtext", "llama-3.1"),
        pytest.param("tunix", "qwen2", marks=pytest.mark.slow),
        pytest.param("gemma", "gemma3", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_loaded_model(library: str, name: str, tmp_path: Path) -> None:
    tree = WRITERS[library](written(name, tmp_path), CONFIGS[name])
    params = Params.from_tree({"params": jax.tree.map(jnp.asarray, tree)}, library, CONFIGS[name])
    want, got = (
        kvjax.generate(each, [3, 1, 4, 1, 5, 9, 2, 6] * 3, policy="tova:20", max_new_tokens=8).tokens
        for each in (kvjax.load(tmp_path), params)
    )
    assert got == want


def tree_of(name: str) -> tuple[dict[str, Any], Params]:
    params = init(from_hf(CONFIGS[name]), jax.random.key(0))
    return params.to_tree("maxtext"), params


def test_queries_are_scaled_to_the_nearest_number() -> None:
    """A head of 6 channels: 1 / sqrt(6) is not a float."""
    config = from_hf(CONFIGS["llama"] | {"head_dim": 6})
    params = init(config, jax.random.key(0))
    tree = params.to_tree("maxtext")
    query = np.asarray(tree["decoder"]["layers"]["self_attention"]["query"]["kernel"])
    want = np.stack([np.asarray(layer.attn.q).T.reshape(32, 4, 6) for layer in params.layers], axis=1)
    np.testing.assert_allclose(query * np.sqrt(6), want, rtol=2e-7)
    back = Params.from_tree(tree, "maxtext", config)
    np.testing.assert_allclose(back.layers[0].attn.q, params.layers[0].attn.q, rtol=2e-7)


def test_boxes_states_and_outer_levels_are_opened() -> None:
    tree, params = tree_of("qwen3")
    boxed = jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), tree)
    state = nnx.State(jax.tree.map(nnx.Param, tree))
    for given in ({"params": {"params": tree}}, boxed, state, {"transformer/" + k: v for k, v in tree.items()}):
        jax.tree.map(np.testing.assert_array_equal, Params.from_tree(given, "maxtext", params.config), params)


def test_types_and_sharing() -> None:
    _, params = tree_of("qwen2")
    tree = params.to_tree("tunix")
    same = Params.from_tree(tree, "tunix", params.config)
    assert same.embed.unsafe_buffer_pointer() == params.embed.unsafe_buffer_pointer()
    other = Params.from_tree(tree, "tunix", params.config, dtype="bfloat16", tokenizer="a tokenizer")
    assert {leaf.dtype for leaf in jax.tree.leaves(other)} == {jnp.dtype("bfloat16")}
    assert other.tokenizer == "a tokenizer"


def test_a_vision_encoder_is_skipped() -> None:
    params = init(from_hf(GEMMA), jax.random.key(0))
    tree = params.to_tree("gemma")
    tree["vision_encoder"] = {"kernel": jnp.zeros(3)}
    tree["embedder"]["mm_input_projection"] = {"w": jnp.zeros((3, 32))}
    jax.tree.map(np.testing.assert_array_equal, Params.from_tree(tree, "gemma", GEMMA), params)


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        *folders, name = path.split(".")
        for folder in folders:
            tree = tree[folder]
        if value is None:
            del tree[name]
        else:
            tree[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("decoder.decoder_norm.scale", None), "maxtext: the tree has no decoder.decoder_norm.scale. Pass all"),
        (changed("decoder.lora", jnp.zeros(2)), r"maxtext: decoder.lora has no counterpart in a qwen2 model"),
        (
            changed("token_embedder.embedding", jnp.zeros((60, 32))),
            r"maxtext: token_embedder.embedding has the shape \(60, 32\), but the configuration needs \(64, 32\)",
        ),
        (
            changed("decoder.layers.mlp.wo.kernel", jnp.zeros((48, 3, 32))),
            r"mlp.wo.kernel has the shape \(48, 3, 32\), but the configuration needs \(48, 2, 32\)",
        ),
    ],
)
def test_other_trees_are_refused(change: Callable[[dict[str, Any]], None], says: str) -> None:
    tree, params = tree_of("qwen2")
    change(tree)
    with pytest.raises(CheckpointError, match=says):
        Params.from_tree(tree, "maxtext", params.config)


@pytest.mark.parametrize(
    ("layout", "config", "says"),
    [
        ("jetstream", CONFIGS["llama"], "layout='jetstream': unknown. Use tunix, gemma, maxtext"),
        ("gemma", CONFIGS["llama"], "gemma: family 'llama' is not supported. Supported are gemma3_text"),
        ("maxtext", CONFIGS["llama"] | {"attention_bias": True}, "has no layers.0.attn.o_bias"),
        ("maxtext", CONFIGS["qwen2"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "Linear scaling"),
        ("maxtext", 3, "maxtext: a configuration of type int cannot be read .*decoder_block"),
        ("jetstream", 3, "layout='jetstream': unknown. Use tunix, gemma, maxtext"),
        ("tunix", 3, "tunix: a configuration of builtins is not supported. Use one of qwen2, qwen3, llama3, gemma3"),
    ],
)
def test_other_models_are_refused(layout: str, config: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Params.from_tree({}, layout, config)


def test_quantised_parameters_have_no_tree(tiny: Params) -> None:
    with pytest.raises(CheckpointError, match=r"layers.0.attn.q is quantised; load the model with float weights"):
        quantize_weights(tiny, "int8").to_tree("tunix")


class HuggingFace(SimpleNamespace):
    """A configuration object of transformers."""

    model_type = "qwen3"

    def to_dict(self) -> dict[str, Any]:
        return CONFIGS["qwen3"]


def test_hugging_face_configurations() -> None:
    want = from_hf(CONFIGS["qwen3"])
    assert tree_config(HuggingFace(), "tunix") == tree_config(CONFIGS["qwen3"], "maxtext") == want
    assert tree_config(want, "gemma") is want


def expected(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration of a library's model: it has no window."""
    return config | {"max_position_embeddings": MAX_POSITION} | changes


SHARED: dict[str, Any] = {"embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SCALAR = SimpleNamespace(name="BY_ONE_OVER_SQRT_HEAD_DIM")
GEMMA_OWN: dict[str, Any] = SHARED | {
    "num_embed": 64,
    "sliding_window_size": 8,
    "local_base_frequency": 10_000,
    "global_base_frequency": 1_000_000,
    "local_scale_factor": 1.0,
    "global_scale_factor": 8.0,
    "query_pre_attn_norm": SCALAR,
}
KINDS = [SimpleNamespace(name="GLOBAL" if i == 5 else "LOCAL_SLIDING") for i in range(7)]


def of_module(module: str, **fields: Any) -> Any:
    """An object whose class is of that module."""
    return type("ModelConfig", (SimpleNamespace,), {"__module__": module})(**fields)


def test_configurations_of_tunix_and_gemma() -> None:
    plain = SHARED | {"num_layers": 2, "vocab_size": 64, "norm_eps": 1e-6, "rope_theta": 5000}
    qwen2 = of_module("tunix.models.qwen2.model", **plain, use_tied_embedding=True)
    llama = of_module("tunix.models.llama3.model", **plain, weight_tying=False)
    assert tree_config(qwen2, "tunix") == from_hf(expected(CONFIGS["qwen2"], rope_theta=5000.0))
    assert tree_config(llama, "tunix") == from_hf(expected(CONFIGS["llama"], rope_theta=1e6))
    gemma3 = expected(GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert tree_config(of_module("tunix.models.gemma3.model", **GEMMA_OWN, num_layers=7), "tunix") == from_hf(gemma3)
    own = {"use_qk_norm": True, "transpose_gating_einsum": True, "attn_logits_soft_cap": None}
    capped = SimpleNamespace(**GEMMA_OWN, **own, attention_types=KINDS, final_logit_softcap=30.0)
    assert tree_config(capped, "gemma") == from_hf(gemma3 | {"final_logit_softcapping": 30.0})
    by_width = SimpleNamespace(name="BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS")
    wide = SimpleNamespace(**GEMMA_OWN | {"query_pre_attn_norm": by_width}, **own, attention_types=KINDS)
    assert tree_config(wide, "gemma") == from_hf(gemma3 | {"query_pre_attn_scalar": 8})
    with pytest.raises(CheckpointError, match="not a configuration of Gemma 3"):
        tree_config(SimpleNamespace(**GEMMA_OWN, **own | {"use_qk_norm": False}), "gemma")
    with pytest.raises(
        CheckpointError, match="attn_logits_soft_cap is not supported, as attention kernels have no cap"
    ):
        tree_config(SimpleNamespace(**GEMMA_OWN, **own | {"attn_logits_soft_cap": 50.0}), "gemma")
    with pytest.raises(CheckpointError, match="a model with 8 experts"):
        tree_config(of_module("tunix.models.qwen3.model", **plain, num_experts=8), "tunix")


MAXTEXT: dict[str, Any] = {
    "emb_dim": 32, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 48, "num_decoder_layers": 2,
    "vocab_size": 64, "normalization_layer_epsilon": 1e-6, "logits_via_embedding": False, "rope_use_scale": True,
    "normalize_embedding_logits": True, "rope_type": "default", "rope_max_timescale": 10_000, "model_name": "default",
    "attention_bias": False, "use_qk_norm": False,
}  # fmt: skip


def test_configurations_of_maxtext() -> None:
    def config(block: str, **changes: Any) -> Any:
        return tree_config(SimpleNamespace(**MAXTEXT | {"decoder_block": block} | changes), "maxtext")

    assert config("llama2") == from_hf(expected(CONFIGS["llama"]))
    tied = {"logits_via_embedding": True, "normalize_embedding_logits": False}
    assert config("llama2", model_name="llama3.1-8b", **tied) == from_hf(expected(CONFIGS["llama-3.1"]))
    assert config("qwen2", attention_bias=True, **tied) == from_hf(expected(CONFIGS["qwen2"]))
    assert config("qwen3", use_qk_norm=True) == from_hf(expected(CONFIGS["qwen3"]))
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_mlp_dim": 24, "norm_topk_prob": True}
    assert config("qwen3_moe", use_qk_norm=True, **experts) == from_hf(expected(CONFIGS["qwen3-moe"]))
    for changes, says in (
        ({"decoder_block": "deepseek"}, "decoder_block=deepseek is not supported. Supported are llama2"),
        ({"logits_via_embedding": True}, "normalize_embedding_logits=True is not supported"),
        ({"rope_type": "llama3.1", "rope_use_scale": False}, "rope_use_scale=False"),
    ):
        with pytest.raises(CheckpointError, match=says):
            config(
                **{"block": "llama2"} if "decoder_block" not in changes else {"block": "deepseek"},
                **{name: value for name, value in changes.items() if name != "decoder_block"},
            )
