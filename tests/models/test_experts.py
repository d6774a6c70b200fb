"""Mixtures of experts against their definition in NumPy, for every number of tokens and any load of the experts."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HF_CONFIG, weights, write_hf
from oracles import numbers

import kvjax
from kvjax.bench.floor import weight_bytes
from kvjax.cache.shard import ONE_DEVICE
from kvjax.config import PRESETS, AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, RopeConfig
from kvjax.conversion import CheckpointError, from_hf, load, quantize_weights, to_hf
from kvjax.models import Params, abstract, init
from kvjax.models.experts import route, routed
from kvjax.models.params import Experts, nbytes
from kvjax.models.sharding import get_shard
from kvjax.models.transformer import forward

MIXER = AttentionConfig(4, 2, 8, RopeConfig(1e4, 8))


def model(moe: MoEConfig, layers: int = 2) -> ModelConfig:
    """A tiny model whose layers all have these experts."""
    return ModelConfig("qwen3_moe", 64, 32, (LayerConfig(MIXER, moe),) * layers, 256)


def experts_of(params: Params) -> Experts:
    found = params.layers[0].mlp
    assert isinstance(found, Experts)
    return found


def by_definition(moe: MoEConfig, p: Experts, x: np.ndarray) -> np.ndarray:
    """Each token through each of its experts, in float64."""
    floats = [
        np.asarray(numbers(w) if hasattr(w, "levels") else w, np.float64) for w in vars(p).values() if w is not None
    ]
    router, gate, up, down = floats[:4]
    out = np.zeros(x.shape)
    for row, token in enumerate(np.asarray(x, np.float64)):
        logits = router @ token
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[: moe.per_token]
        share = probs[chosen] / (probs[chosen].sum() if moe.normalized else 1.0)
        for expert, weight in zip(chosen, share, strict=True):
            rows, outputs = (slice(expert * n, (expert + 1) * n) for n in (moe.width, x.shape[1]))
            g = gate[rows] @ token
            out[row] += weight * (down[outputs] @ (g / (1 + np.exp(-g)) * (up[rows] @ token)))
    return out


@pytest.mark.parametrize(("normalized", "expected"), [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])])
def test_routing_by_hand(normalized: bool, expected: list[float]) -> None:
    """Logits 2, 1, 0, -1, of which two are chosen."""
    moe = MoEConfig(4, 2, 8, normalized)
    router = jnp.asarray([[2.0, 0], [1, 0], [0, 0], [-1, 0]])
    experts, shares = route(moe, router, jnp.asarray([[1.0, 5.0], [-1.0, 3.0], [0.0, 2.0]]))
    np.testing.assert_array_equal(experts, [[0, 1], [3, 2], [0, 1]])  # ties go to the first
    np.testing.assert_allclose(shares[:2], [expected] * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "normalized", "expected"),
    [(1.0, True, [0.362110, 0.637890]), (2.5, True, [0.905274, 1.594726]), (2.5, False, [1.25, 2.201993])],
)
def test_sigmoid_routing_by_hand(scale: float, normalized: bool, expected: list[float]) -> None:
    """Logits 2, 1, 0, -1, of which the third is preferred by its bias alone: the bias does not weight its output."""
    moe = MoEConfig(4, 2, 8, normalized, router="sigmoid", output_scale=scale)
    router = jnp.asarray([[2.0, 0], [1, 0], [0, 0], [-1, 0]])
    experts, shares = route(moe, router, jnp.asarray([[1.0, 5.0]]), jnp.asarray([0.0, 0, 0.5, 0]))
    np.testing.assert_array_equal(experts, [[2, 0]])
    np.testing.assert_allclose(shares, [expected], atol=1e-6)


def test_experts_of_the_best_groups_by_hand() -> None:
    """Sigmoids .9 .1 | .6 .5 | .4 .45: the groups' sums are 1, 1.1 and .85, so that expert 0 is left out with one group."""
    sigmoids = np.array([0.9, 0.1, 0.6, 0.5, 0.4, 0.45], np.float32)
    router = jnp.asarray(np.log(sigmoids / (1 - sigmoids))[:, None])
    for groups, expected in ((1, [2, 3]), (2, [0, 2]), (3, [0, 2])):
        moe = MoEConfig(6, 2, 8, router="sigmoid", groups=3, groups_per_token=groups)
        experts, _ = route(moe, router, jnp.ones((1, 1)), jnp.zeros(6))
        np.testing.assert_array_equal(experts, [expected])


def test_biases_of_a_sigmoid_router_stay_in_float32(tmp_path: Path) -> None:
    """In a model in bfloat16, from and to files. Differences of 1e-4 beside 5 are lost in bfloat16."""
    config = from_hf(
        HF_CONFIG
        | {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    )
    biases = np.float32(5) + np.arange(4, dtype=np.float32) * np.float32(1e-4)
    tensors = {name: biases if "correction" in name else x for name, x in weights(config).items()}
    write_hf(tmp_path / "hf", HF_CONFIG | to_hf(config), tensors)
    params = load(tmp_path / "hf", dtype="bfloat16")
    for form in ("safetensors", "orbax"):
        kvjax.save(params, tmp_path / form, format=form)
    read = [load(tmp_path / form, dtype="bfloat16") for form in ("safetensors", "orbax")]
    for each in (params, quantize_weights(params, "int8"), *read):
        found = each.layers[1].mlp
        assert isinstance(found, Experts)
        assert found.choice_bias is not None
        assert found.choice_bias.dtype == np.float32
        np.testing.assert_array_equal(found.choice_bias, biases)
    assert params.dtype == jnp.bfloat16
    prompt = [3, 1, 4, 1, 5]
    kvjax.Engine(load(tmp_path / "hf"), batch=1, prompt_len=8, max_new_tokens=4, policy="full", dtype="bfloat16")
    assert len(kvjax.generate(params, prompt, policy="full", max_new_tokens=4, ignore_eos=True).tokens) == 4


@pytest.mark.parametrize("tokens", [1, 3, 42, 43, 300])
@pytest.mark.parametrize("normalized", [False, True])
def test_experts_by_definition(tokens: int, normalized: bool) -> None:
    """One tile a pair for few tokens, larger tiles for more."""
    moe = MoEConfig(7, 3, 20, normalized)
    p = experts_of(init(model(moe), jax.random.key(tokens)))
    x = np.random.default_rng(tokens).normal(size=(tokens, 32)).astype(np.float32)
    got = jax.jit(lambda p, x: routed(moe, p, x, None, ONE_DEVICE))(p, jnp.asarray(x))
    np.testing.assert_allclose(got, by_definition(moe, p, x), atol=2e-5)


@pytest.mark.parametrize("tokens", [5, 300])
def test_all_tokens_may_choose_the_same_experts(tokens: int) -> None:
    moe = MoEConfig(6, 2, 8)
    p = experts_of(init(model(moe), jax.random.key(0)))
    p = dataclasses.replace(p, router=jnp.zeros_like(p.router).at[4, 0].set(9.0).at[1, 0].set(5.0))
    x = np.abs(np.random.default_rng(0).normal(size=(tokens, 32))).astype(np.float32)
    experts, _ = route(moe, p.router, jnp.asarray(x))
    assert set(np.asarray(experts).ravel().tolist()) == {1, 4}
    got = jax.jit(lambda p, x: routed(moe, p, x, None, ONE_DEVICE))(p, jnp.asarray(x))
    np.testing.assert_allclose(got, by_definition(moe, p, x), atol=2e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [3, 60])
def test_quantised_experts_are_their_numbers(kind: str, tokens: int) -> None:
    moe = MoEConfig(6, 3, 32)
    params = quantize_weights(init(model(moe), jax.random.key(1)), kind)
    p = experts_of(params)
    assert p.gate_experts.shape == (6 * 32, 32)
    x = np.random.default_rng(1).normal(size=(tokens, 32)).astype(np.float32)
    got = jax.jit(lambda p, x: routed(moe, p, x, None, ONE_DEVICE))(p, jnp.asarray(x))
    np.testing.assert_allclose(got, by_definition(moe, p, x), atol=3e-4)


def test_rows_do_not_depend_on_others() -> None:
    """A row beside other rows gives what it gives alone."""
    params = init(model(MoEConfig(6, 2, 16)), jax.random.key(2))
    prompts = [np.random.default_rng(i).integers(0, 64, size).tolist() for i, size in enumerate((40, 3, 17))]
    options: Any = {"policy": "snapkv:budget=20,window=4", "max_new_tokens": 16, "ignore_eos": True}
    together = kvjax.generate(params, prompts, **options)
    assert [each.tokens for each in together] == [kvjax.generate(params, one, **options).tokens for one in prompts]


def test_experts_have_gradients() -> None:
    params = init(model(MoEConfig(4, 2, 8), 1), jax.random.key(3))
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])

    def loss(params: Params) -> Any:
        return jnp.sum(jnp.square(forward(params, tokens)))

    gradient = jax.jit(jax.grad(loss))(params)
    for name, leaf in vars(experts_of(gradient)).items():
        if leaf is not None:
            assert float(jnp.max(jnp.abs(leaf))) > 0, name


def test_bound_counts_experts_that_are_hit() -> None:
    """Qwen3-30B-A3B: a step reads 6.1 GB for one row and 25.8 for eight, of 61 (an even, independent load)."""
    shapes = abstract(PRESETS["qwen3-30b-a3b"], "bfloat16")
    assert nbytes(shapes) == pytest.approx(61.06e9, rel=1e-3)
    for rows, gb in ((1, 6.08), (2, 9.48), (4, 15.65), (8, 25.84), (16, 39.80)):
        assert weight_bytes(shapes, rows) == pytest.approx(1e9 * gb, rel=2e-3)


def test_experts_in_mxfp4() -> None:
    """gpt-oss-20b: 13.8 GB, of which a step of one row reads 3.7, and 9.1 of eight. Other matrices stay in bfloat16."""
    shapes = abstract(PRESETS["gpt-oss-20b"], "bfloat16", weights="mxfp4", embedding="mxfp4")
    assert nbytes(shapes) == pytest.approx(13.76e9, rel=1e-3)
    for rows, gb in ((1, 3.72), (8, 9.11)):
        assert weight_bytes(shapes, rows) == pytest.approx(1e9 * gb, rel=2e-3)
    p = experts_of(shapes)
    assert (getattr(p.gate_experts, "kind", None), p.router.dtype) == ("mxfp4", jnp.bfloat16)
    made = init(model(MoEConfig(4, 2, 64)), jax.random.key(0), weights="mxfp4")
    assert 1 / 1.5 < float(jnp.std(numbers(experts_of(made).gate_experts))) * 32**0.5 < 1.5
    with pytest.raises(ValueError, match="weights='mxfp4' is for experts"):
        abstract(PRESETS["llama-2-7b"], weights="mxfp4")
    with pytest.raises(ValueError, match="a matrix with 20 inputs cannot be in MXFP4"):
        abstract(model(MoEConfig(4, 2, 20)), weights="mxfp4")


def test_wrong_mixtures_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="per_token=5 must be at most experts=4"):
        MoEConfig(4, 5, 8)
    with pytest.raises(ValueError, match="shared_gate needs a shared MLP"):
        MoEConfig(4, 2, 8, shared_gate=True)
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    with pytest.raises(ValueError, match="2 devices along model and sequence cannot share 3 experts"):
        get_shard(mesh, model(MoEConfig(3, 2, 8)))
    with pytest.raises(ValueError, match=r"2 devices along model cannot share heads whose .* normalised together"):
        get_shard(mesh, model(MoEConfig(4, 2, 8)).with_attention(qk_norm=True, joint_qk_norm=True))
    with pytest.raises(ValueError, match="joint_qk_norm=True needs qk_norm=True"):
        model(MoEConfig(4, 2, 8)).with_attention(joint_qk_norm=True)


FIELDS = HF_CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def single(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor per expert, as on the hub."""
    found = {}
    for name, value in tensors.items():
        if ".experts." in name:
            base, matrix = name.removesuffix(".weight").rsplit(".", 1)
            found |= {f"{base}.{i}.{matrix}.weight": part for i, part in enumerate(np.split(value, 3))}
        else:
            found[name] = value
    return found


def merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two tensors of all experts, as transformers 5 may write."""
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    for i in range(2):
        base = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            tensors[f"{base}{x}_proj.weight"].reshape(3, -1, tensors[f"{base}{x}_proj.weight"].shape[1])
            for x in ("gate", "up", "down")
        )
        found |= {f"{base}gate_up_proj": np.concatenate([gate, up], axis=1), f"{base}down_proj": down}
    return found


@pytest.mark.parametrize("kind", ["float", "int8"])
def test_both_spellings_of_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("kvjax.conversion.experts._READ_AT_ONCE", 2 * 32 * 32)
    held = weights(from_hf(FIELDS))
    write_hf(tmp_path / "single", FIELDS, single(held))
    write_hf(tmp_path / "merged", FIELDS, merged(held))
    one, other = (load(tmp_path / name, weights=kind) for name in ("single", "merged"))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    if kind == "float":
        np.testing.assert_array_equal(experts_of(one).down_experts, held["model.layers.0.mlp.experts.down_proj.weight"])
    kvjax.save(one, tmp_path / "again", format="safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "again"), one)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    held = single(weights(from_hf(FIELDS)))
    del held["model.layers.1.mlp.experts.1.up_proj.weight"]
    write_hf(tmp_path, FIELDS, held)
    with pytest.raises(
        CheckpointError, match=r"expert 1 of model\.layers\.1\.mlp\.experts\.up_proj\.weight is missing"
    ):
        load(tmp_path)


def test_dense_layers_and_experts_have_their_own_parameters() -> None:
    config = from_hf(FIELDS | {"mlp_only_layers": [0], "num_hidden_layers": 3, "decoder_sparse_step": 1})
    assert [type(layer.mlp) for layer in config.layers] == [MLPConfig, MoEConfig, MoEConfig]
    config = from_hf(FIELDS | {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert [type(layer.mlp) for layer in config.layers] == [MLPConfig, MoEConfig] * 2
