"""kvjax as a rollout engine of tunix: what can be tested without tunix, and a script that runs where it is installed."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations.tunix_layout import theirs
from jax.sharding import Mesh

from kvjax.cache.shard import ONE_DEVICE
from kvjax.conversion.tree_config import MAX_POSITION, TUNIX_THETA
from kvjax.conversion.trees import named
from kvjax.integrations import tunix_weights
from kvjax.integrations.tunix import (
    filters_of,
    left_padded,
    mesh_from,
    padded_length,
    rollout_engine,
    sampled,
    seed_of,
)
from kvjax.integrations.tunix_weights import Weights, config_of, tunix_names
from kvjax.models import Params
from kvjax.models.params import tree_map_named
from kvjax.policies import PolicyError
from kvjax.runtime.rollouts import Rollouts

ROOT = Path(__file__).resolve().parents[2]
CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")

PACKAGES = (
    "google-tunix==0.1.7",
    "google-metrax>=0.2.3",
    "clu",
    "perfetto",
    "sentencepiece",
    "tensorboardX",
    "wrapt",
)
"""tunix, and what its modules for reinforcement learning import that kvjax's tests do not need."""


def weights(params: Params, dtype: Any = jnp.float32) -> tuple[Weights, dict[str, Any]]:
    state = theirs(params)
    return Weights(params.config, state, dtype, ONE_DEVICE, jax.devices()[0]), state


def test_weights_are_mapped_and_shared(tiny: Params) -> None:
    made, state = weights(tiny)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(made.params), jax.tree.leaves(tiny))
    shared = {
        name: made_array.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()
        for name, given in named(state).items()
        for made_array in [named_of(made.params)[name]]
    }
    assert {name for name, same in shared.items() if not same} == {
        name for name in shared if name.endswith(("proj.w", "kernel", "lm_head.w"))
    }


def named_of(params: Params) -> dict[str, Any]:
    """kvjax's arrays by tunix's names."""
    found: dict[str, Any] = {}
    names = tunix_names(params.config)
    tree_map_named(lambda name, leaf: found.setdefault(names[name], leaf), params)
    return found


def allocated() -> int:
    """Bytes of all arrays. Arrays that share a buffer count once."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def test_an_update_frees_each_matrix_and_leaves_the_trainers_arrays(tiny: Params, monkeypatch) -> None:
    made, state = weights(tiny)
    before, other = made.params, jax.tree.map(lambda x: x * 1.5, tiny)
    trained = theirs(other)
    relaid, held = tunix_weights._relaid, []

    def noted(*args: Any) -> Any:
        made = relaid(*args)
        held.append(allocated())
        return made

    monkeypatch.setattr(tunix_weights, "_relaid", noted)
    at_rest = allocated()
    made.update(trained)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(made.params), jax.tree.leaves(other))
    assert len(held) == 2 * 7 + 1
    assert max(held) <= at_rest, "memory never holds two sets"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, trained)))
    assert before.layers[1].mlp.down.is_deleted()
    assert not before.norm.is_deleted()


def test_another_type_is_converted(tiny: Params) -> None:
    made, state = weights(tiny, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(made.params)} == {jnp.dtype("bfloat16")}
    before = made.params
    made.update(state)
    assert before.embed.is_deleted()
    assert before.norm.is_deleted()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("final_norm"), "have no 'final_norm.w'. Pass all"),
        (lambda state: state["layers"].pop(1), r"have no 'layers.1.*and 8 more"),
        (lambda state: state.update(lora={"a": jnp.zeros(1)}), "'lora.a' has no counterpart. LoRA"),
        (lambda state: state["final_norm"].update(w=jnp.zeros(47)), r"final_norm.w has the shape \(47,\)"),
        (lambda state: state["lm_head"].update(w=jnp.zeros((64, 48))), r"lm_head.w has the shape \(64, 48\)"),
    ],
)
def test_other_parameters_are_refused_and_change_nothing(tiny: Params, change, says: str) -> None:
    made, state = weights(tiny)
    before = made.params
    change(state)
    with pytest.raises(ValueError, match=says):
        made.update(state)
    assert made.params is before
    assert not before.layers[0].attn.q.is_deleted()


def model(name: str, **more: Any) -> Any:
    config = SimpleNamespace(
        num_layers=2, vocab_size=64, embed_dim=48, hidden_dim=96, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=5000, norm_eps=1e-6, **more,
    )  # fmt: skip
    made = type(name, (), {})()
    made.config = config
    return made


def test_configurations() -> None:
    qwen2 = config_of(model("Qwen2", use_tied_embedding=True))
    assert (qwen2.family, qwen2.tied, qwen2.qkv_bias, qwen2.qk_norm, qwen2.rope.theta) == (
        "qwen2",
        True,
        True,
        False,
        5e3,
    )
    assert (qwen2.hidden_size, qwen2.intermediate_size, qwen2.max_position) == (48, 96, MAX_POSITION)
    qwen3 = config_of(model("Qwen3", use_tied_embedding=False, num_experts=None))
    assert (qwen3.family, qwen3.tied, qwen3.qkv_bias, qwen3.qk_norm) == ("qwen3", False, False, True)
    llama = config_of(model("Llama3", weight_tying=True))
    assert (llama.family, llama.tied, llama.qkv_bias, llama.qk_norm) == ("llama", True, False, False)
    assert qwen3.rope.theta == llama.rope.theta == TUNIX_THETA


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (model("Gemma"), "Gemma is not supported. Use a model of tunix.models.qwen2, qwen3 or llama3"),
        (model("Qwen3", num_experts=8), "a model with 8 experts"),
        (3, "int is not supported"),
    ],
)
def test_other_models_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(given)


def test_samples_come_back_in_the_order_of_the_prompts(tiny: Params) -> None:
    rollouts = Rollouts(tiny, rows=3, max_prompt_tokens=64, max_new_tokens=16)
    a, b = [1, 2, 3], [4, 5]
    options = {"max_new_tokens": 6, "temperature": 0.0}
    ((of_a,), (of_b,)) = rollouts.generate([a, b], **options)
    for prompts, want in (([a, b, b, a], [of_a, of_b, of_b, of_a]), ([b, a, b], [of_b, of_a, of_b])):
        assert [sample.tokens for sample in sampled(rollouts, prompts, **options)] == [each.tokens for each in want]
    drawn = sampled(rollouts, [a, b, a, b], max_new_tokens=6, temperature=3.0)
    assert len({tuple(sample.tokens) for sample in drawn}) == 4


def test_arguments_of_a_call() -> None:
    assert filters_of(SimpleNamespace(top_k=None, top_p=1.0)) == filters_of(SimpleNamespace(top_k=-1, top_p=None)) == {}
    assert filters_of(SimpleNamespace(top_k=5, top_p=0.9)) == {"top_k": 5, "top_p": 0.9}
    assert [padded_length([[1] * n], 24) for n in (1, 24, 25, 33, 64)] == [24, 24, 32, 64, 64]
    np.testing.assert_array_equal(left_padded([[1, 2], [3]], 3, 9), [[9, 1, 2], [9, 9, 3]])
    assert seed_of(7) == seed_of(jax.random.PRNGKey(7)) == seed_of(jax.random.key(7)) == 7


def test_meshes() -> None:
    devices = np.asarray([jax.devices()[0]])
    assert mesh_from(Mesh(devices.reshape(1, 1), ("fsdp", "tp"))) is None


def test_the_policy_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(PolicyError, match="snapvk"):
        rollout_engine("snapvk")
    with pytest.raises(ValueError, match="rows=0"):
        rollout_engine(rows=0)


def test_without_tunix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["google-tunix==0.1.7; extra == 'tunix'"])
    with pytest.raises(ImportError, match=r"needs tunix: pip install google-tunix==0\.1\.7 \("):
        rollout_engine("full")


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.rotating  # its version is pinned, and other tests have its layout of weights
def test_with_tunix(tmp_path: Path) -> None:
    """In an environment that adds tunix to this one."""
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    site = tmp_path / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "this.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile"]
    installed = subprocess.run([*install, *PACKAGES], capture_output=True, text=True)
    if installed.returncode:
        if CI:
            raise AssertionError(installed.stderr)
        pytest.skip(f"tunix cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    ran = subprocess.run(
        [python, Path(__file__).with_name("tunix_script.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split() == [
        word
        for name in (
            "qwen2",
            "qwen3",
            "llama3",
            "gemma3",
            "sampling",
            "compressed",
            "refused",
            "grpo",
            "several",
            "overlapping",
        )
        for word in (name, "ok")
    ]
