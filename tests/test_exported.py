"""Exported programs: they run without kvjax, and compute what kvjax computes."""

import json
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import compositions, each, every_policy, offloads

import kvjax
from kvjax.models import Params
from kvjax.policies import Policy, PolicyError
from kvjax.runtime.decoding import padded
from kvjax.runtime.exported import PLATFORMS

PROMPTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((48, 20))]
NEW = 16
SIZES = {"batch": 2, "prompt_len": 48, "max_new_tokens": NEW}

# What a process without kvjax does with the files: greedy decoding. It refuses to import kvjax.
ALONE = textwrap.dedent("""
    import json, sys
    from pathlib import Path
    sys.modules["kvjax"] = None
    import jax.export
    import numpy as np

    folder = Path(sys.argv[1])
    told = json.loads((folder / "programs.json").read_text())
    prefill, step = (jax.export.deserialize(bytearray((folder / f"{name}.bin").read_bytes())) for name in ("prefill", "step"))
    held = np.load(folder / "weights.npz")
    weights = [held[one["name"]].view(one["dtype"]) for one in told["weights"]]
    prompts = json.loads(sys.argv[2])
    tokens = np.zeros(told["prefill"][0]["shape"], np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    position = np.asarray([len(prompt) for prompt in prompts], np.int32)
    logits, *state = prefill.call(*weights, tokens, position)
    answers = []
    for _ in range(told["max_new_tokens"]):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        answers.append(token)
        logits, *state = step.call(*weights, token, position, *state)
        position = position + 1
    print(json.dumps(np.stack(answers, axis=1).tolist()))
""")


def decoded(exported: kvjax.Exported, params: Params) -> list[list[int]]:
    """Greedy tokens by the programs as they come back from their bytes."""
    prefill, step = (
        jax.export.deserialize(bytearray(program.serialize())) for program in (exported.prefill, exported.step)
    )
    weights = jax.tree.leaves(params)
    tokens, position = padded(PROMPTS, prefill.in_avals[len(weights)].shape[1])
    logits, *state = prefill.call(*weights, tokens, position)
    answers = []
    for _ in range(NEW):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        answers.append(token)
        logits, *state = step.call(*weights, token, position, *state)
        position = position + 1
    return np.stack(answers, axis=1).tolist()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_process_without_kvjax_runs_them(dtype, tiny, tmp_path):
    tiny = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny)
    exported = kvjax.export(tiny, "treekv", 24, **SIZES)
    exported.save(tmp_path)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tiny)]
    np.savez(tmp_path / "weights.npz", **dict(zip(exported.weights, leaves, strict=True)))
    command = [sys.executable, "-c", ALONE, str(tmp_path), json.dumps(PROMPTS)]
    answers = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    want = kvjax.generate(tiny, PROMPTS, "treekv", 24, max_new_tokens=NEW, ignore_eos=True)
    assert json.loads(answers) == [row.tokens for row in want]
    told = json.loads((tmp_path / "programs.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in told["step"][2:]] == list(exported.state)
    assert [one["shape"] for one in told["results"][:1]] == [[2, 64]]
    assert "batch=2, prompt_len=64" in repr(exported)


@pytest.mark.rotating
@each(every_policy(24) + compositions(24), later=True)
def test_tokens_are_those_of_generate(policy: Policy, tiny: Params):
    want: Any = kvjax.generate(tiny, PROMPTS, policy, max_new_tokens=NEW, ignore_eos=True)
    assert decoded(kvjax.export(tiny, policy, **SIZES), tiny) == [row.tokens for row in want]


def test_one_file_serves_several_platforms(tiny):
    exported = kvjax.export(tiny.config, "snapkv", 40, **SIZES, dtype="float32", platforms=("cpu", "cuda", "tpu"))
    assert exported.prefill.platforms == exported.step.platforms == ("cpu", "cuda", "tpu")
    want = kvjax.generate(tiny, PROMPTS, "snapkv", 40, max_new_tokens=NEW, ignore_eos=True)
    assert decoded(exported, tiny) == [row.tokens for row in want]


def test_functions_of_states_are_exported(tiny):
    """A function of one's own that takes and returns a state: its classes are registered."""
    (policy,) = (policy for policy in every_policy(16) if policy.info.name == "treekv")
    spec = kvjax.cache.LayerSpec(num_heads=4, num_kv_heads=2, head_dim=16, prompt_len=32, new_tokens=16)
    layer = policy.layer(spec)
    shapes = jax.eval_shape(layer.init)
    for _ in range(2):
        kvjax.register_for_export(shapes)
    program = jax.export.deserialize(bytearray(jax.export.export(jax.jit(layer.compress))(shapes).serialize()))
    got, want = program.call(layer.init()), layer.compress(layer.init())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@each(every_policy(24) + compositions(24), later=True)
def test_states_of_every_policy_can_be_registered(policy, tiny):
    specs = kvjax.cache.layer_specs(tiny.config, 2, 48, NEW, jnp.float32)
    states = jax.eval_shape(lambda: [policy.layer(spec).init() for spec in specs])
    kvjax.register_for_export(states)
    program = jax.export.export(jax.jit(lambda x: x))(states)
    assert jax.export.deserialize(bytearray(program.serialize())).in_tree == program.in_tree


def test_what_cannot_be_exported_is_refused(tiny):
    with pytest.raises(ValueError, match=rf"platforms=\['gpu'\]; give some of {', '.join(PLATFORMS)}"):
        kvjax.export(tiny, prompt_len=16, platforms=["gpu"])
    (policy, *_) = offloads(24)
    with pytest.raises(PolicyError, match="host memory cannot be exported"):
        kvjax.export(tiny, policy, **SIZES)
