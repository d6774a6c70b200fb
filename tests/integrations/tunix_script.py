"""Checks of `kvjax.integrations.tunix` against tunix itself, run by `test_tunix.py` in an environment that has tunix."""

# pyright: reportMissingImports=false

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from kvjax.integrations.tunix import rollout_engine
from kvjax.models import Params
from kvjax.models.transformer import forward
from kvjax.runtime import logprobs, rows

jax.config.update("jax_num_cpu_devices", 4)

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 48,
    "hidden_dim": 96,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-6,
}
PAD, END = 0, 1


def mesh(devices: slice, *shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[devices]).reshape(shape), ("fsdp", "tp"))


MESH = mesh(slice(1), 1, 1)
PROMPTS = ["the sea", "once upon a time", "the sea", "a"]
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=12, max_prompt_length=24, kv_cache_size=64, temperature=0.0, top_p=None, return_logprobs=True
)

compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
)


def executables() -> int:
    """Number of kvjax's compiled programs in this process."""
    modules = (*vars(rows).values(), *vars(logprobs).values())
    return sum(len(program.executables) for program in modules if isinstance(program, rows.Program))


class Characters:
    """A tokenizer: a token for each character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [2 + ord(character) % 62 for character in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(96 + token) for token in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


def model(family: str, seed: int = 1) -> Any:
    """A random model. Where tunix initialises with constants, it gets random numbers too."""
    made = {
        "qwen2": lambda rngs: qwen2.Qwen2(qwen2.ModelConfig(**SIZES, use_tied_embedding=True), rngs=rngs),
        "qwen3": lambda rngs: qwen3.Qwen3(qwen3.ModelConfig(**SIZES, num_experts=None), rngs=rngs),
        "llama3": lambda rngs: llama3.Llama3(llama3.ModelConfig(**SIZES), rngs=rngs),
    }[family](nnx.Rngs(seed))
    nnx.update(made, changed(nnx.state(made), seed, 0.2))
    return made


def changed(state: Any, seed: int, deviation: float) -> Any:
    """The parameters plus random numbers."""
    leaves, tree = jax.tree.flatten(state)
    random = np.random.default_rng(seed)
    noise = [jnp.asarray(random.normal(0, deviation, leaf.shape), leaf.dtype) for leaf in leaves]
    return tree.unflatten([leaf + more for leaf, more in zip(leaves, noise, strict=True)])


def engine(actor: Any, policy: str = "full", config: RolloutConfig = ROLLOUT, **options: Any) -> Any:
    return rollout_engine(policy, **options)(
        rollout_actor=actor, tokenizer=Characters(), mesh=MESH, rollout_config=config
    )


def their_logps(actor: Any, output: Any, temperature: float = 1.0) -> np.ndarray:
    """tunix's log-probabilities of an output's tokens, [B, T]."""
    graph, state = nnx.split(actor)
    return np.asarray(
        common.compute_per_token_logps(graph, state, *padded(output), pad_id=PAD, eos_id=END, temperature=temperature)
    )


def padded(output: Any) -> tuple[jax.Array, jax.Array]:
    """Prompts and completions as tunix's learner pads them."""
    completions = [np.pad(tokens, (0, 12 - len(tokens)), constant_values=PAD) for tokens in output.tokens]
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(np.stack(completions))


def check_forward(actor: Any, params: Params) -> None:
    """Logits of tunix's model and of kvjax's are equal."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(2, 64, (2, 20)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(20), (2, 20))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((20, 20), bool)), (2, 20, 20))
    theirs, _ = actor(tokens, positions, None, causal)
    np.testing.assert_allclose(forward(params, tokens), theirs, atol=1e-4)


def check_tree(actor: Any) -> None:
    """A model's parameters become kvjax's and remain the same on the way back."""
    state = nnx.state(actor, nnx.Param)
    params = Params.from_tree(state, "tunix", actor.config)
    check_forward(actor, params)
    tree = nnx.to_pure_dict(state)
    back = params.to_tree("tunix")
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def check_gemma() -> None:
    """tunix's Gemma 3, with and without shared KV heads."""
    for keys in (1, 4):
        sizes = {name: SIZES[name] for name in ("embed_dim", "hidden_dim", "num_heads", "head_dim")}
        config = gemma3.ModelConfig(
            **sizes,
            num_embed=64,
            num_layers=7,
            num_kv_heads=keys,
            sliding_window_size=8,
            global_base_frequency=1_000_000,
            global_scale_factor=8.0,
            param_dtype=jnp.float32,
        )
        actor = gemma3.Gemma3(config, rngs=nnx.Rngs(1))
        nnx.update(actor, changed(nnx.state(actor), 1, 0.2))
        check_tree(actor)


def check_family(family: str) -> None:
    actor = model(family)
    ours = engine(actor)
    check_forward(actor, ours.model())
    check_tree(actor)

    cache = CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=16)
    want = VanillaRollout(actor, TokenizerAdapter(Characters()), cache).generate(PROMPTS, ROLLOUT)
    got = ours.generate(PROMPTS, ROLLOUT)
    np.testing.assert_array_equal(got.left_padded_prompt_tokens, want.left_padded_prompt_tokens)
    assert not any(PAD in tokens for tokens in want.tokens), "tunix would not attend to these"
    assert got.text == want.text
    for a, b, logps, their in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, strict=True):
        # tunix's own engine drops the end token.
        np.testing.assert_array_equal(a[: len(b)], b)
        assert len(a) == len(logps)
        assert a[len(b) :].tolist() in ([], [END])
        np.testing.assert_allclose(logps[: len(b)], their, atol=1e-4)
    check_logps(ours, actor, got)

    other = model(family, seed=5)
    before, events, programs = ours.model(), len(compiled), executables()
    ours.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
    after = ours.generate(PROMPTS, ROLLOUT)
    assert 0 < len(compiled) == events, f"compiled {compiled[events:]}"
    assert 0 < executables() == programs, "and nothing is loaded from a cache on disk"
    assert before.layers[0].attn.q.is_deleted()
    assert not before.embed.is_deleted()
    assert [a.tolist() for a in after.tokens] != [a.tolist() for a in got.tokens]
    check_logps(ours, other, after)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(actor))), "they are the trainer's"


def check_logps(ours: Any, actor: Any, output: Any, temperature: float = 1.0) -> None:
    """Log-probabilities with the full cache are tunix's."""
    want, prompts_and_completions = their_logps(actor, output, temperature), padded(output)
    got = np.asarray(ours.get_per_token_logps(*prompts_and_completions))
    mask = np.asarray(prompts_and_completions[1]) != PAD
    np.testing.assert_allclose(got, np.where(mask, want, 0), atol=1e-4)
    masked = np.asarray(ours.get_per_token_logps(*prompts_and_completions, completion_mask=mask.astype(np.int32)))
    np.testing.assert_array_equal(masked, got)


def check_sampling() -> None:
    """With `full`, samples' log-probabilities are those of the full cache, at the sampling temperature."""
    config = dataclasses.replace(ROLLOUT, temperature=0.7, top_p=1.0)
    actor = model("qwen2")
    ours = engine(actor, config=config)
    output = ours.generate(PROMPTS, config)
    full = np.asarray(ours.get_per_token_logps(*padded(output)))
    for sampled, row in zip(output.logprobs, full, strict=True):
        np.testing.assert_allclose(sampled, row[: len(sampled)], atol=1e-4)
    check_logps(ours, actor, output, 0.7)
    again = ours.generate(PROMPTS, config)
    assert [a.tolist() for a in again.tokens] != [a.tolist() for a in output.tokens], "each call samples anew"
    seeded = dataclasses.replace(config, seed=jax.random.PRNGKey(3), return_logprobs=False)
    one, two = ours.generate(PROMPTS, seeded), ours.generate(PROMPTS, seeded)
    assert [a.tolist() for a in one.tokens] == [a.tolist() for a in two.tokens]
    assert one.logprobs is None
    with ThreadPoolExecutor(4) as pool:  # as agents call it
        threads = list(pool.map(lambda prompt: ours.generate([prompt], seeded).tokens[0].tolist(), PROMPTS * 2))
    assert threads == [ours.generate([prompt], seeded).tokens[0].tolist() for prompt in PROMPTS] * 2
    best = dataclasses.replace(config, top_k=1)
    greedy = ours.generate(PROMPTS, ROLLOUT)
    assert [a.tolist() for a in ours.generate(PROMPTS, best).tokens] == [a.tolist() for a in greedy.tokens]


def check_compressed() -> None:
    """A compressed cache gives other log-probabilities than the full one."""
    config = dataclasses.replace(ROLLOUT, temperature=1.0, top_p=1.0)
    ours = engine(model("qwen2"), "streaming_llm", budget=8, config=config)
    output = ours.generate(PROMPTS, config)
    full = np.asarray(ours.get_per_token_logps(*padded(output)))
    differences = [np.abs(a - b[: len(a)]).max() for a, b in zip(output.logprobs, full, strict=True)]
    assert max(differences) > 1e-3, differences


def cluster(
    actor: Any, policy: str, config: RolloutConfig, trainer: Mesh = MESH, rollout: Mesh = MESH, **options: Any
) -> RLCluster:
    return RLCluster(
        actor=actor,
        reference=model("qwen2"),
        tokenizer=Characters(),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: rollout},
            rollout_engine=rollout_engine(policy),
            training_config=RLTrainingConfig(actor_optimizer=optax.sgd(0.5), eval_every_n_steps=10, max_steps=2),
            rollout_config=config,
            **options,
        ),
    )


def check_refused() -> None:
    actor = model("qwen2")
    ours = engine(actor)
    state = nnx.to_pure_dict(nnx.state(actor))
    del state["final_norm"]
    for params, says in (
        (state, "no 'final_norm.w'"),
        (nnx.to_pure_dict(nnx.state(actor)) | {"w_lora_a": jnp.zeros(2)}, "LoRA is not supported"),
    ):
        with pytest.raises(ValueError, match=says):
            ours.update_params(params)
    ours.generate(PROMPTS[:1], ROLLOUT)  # nothing has changed
    with pytest.raises(ValueError, match="the list of prompts is empty"):
        ours.generate([], ROLLOUT)
    with pytest.raises(ValueError, match=r"completion_mask has the shape \(1, 3\)"):
        ours.get_per_token_logps(jnp.ones((1, 4), int), jnp.ones((1, 2), int), jnp.ones((1, 3)))
    nothing = ours.get_per_token_logps(jnp.full((1, 4), PAD), jnp.full((1, 2), PAD))
    np.testing.assert_array_equal(nothing, np.zeros((1, 2)))
    with pytest.raises(ValueError, match="streaming_llm: a budget of 2"):
        engine(actor, "streaming_llm", budget=2)
    with pytest.raises(ValueError, match="set offload_to_cpu=False"):
        cluster(actor, "full", ROLLOUT, offload_to_cpu=True)


def check_grpo(trainer: Mesh = MESH, rollout: Mesh = MESH) -> None:
    """Two steps of GRPO, in which tunix passes its new weights to the engine."""
    actor = model("qwen2")
    config = dataclasses.replace(ROLLOUT, temperature=1.0, top_p=1.0)
    made = cluster(actor, "rkv:16", config, trainer, rollout)
    learner = GRPOLearner(
        rl_cluster=made,
        algo_config=GRPOConfig(num_generations=2, num_iterations=2, beta=0.04),
        reward_fns=lambda prompts, completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
    )
    assert learner.should_sync_weights
    before = np.asarray(made.rollout.model().layers[0].attn.q)
    learner.train([{"prompts": np.array(PROMPTS[:2])}, {"prompts": np.array(PROMPTS[2:])}])
    trained = np.asarray(made.actor_trainer.model.layers[0].attn.q_proj.w[...])
    ours = np.asarray(made.rollout.model().layers[0].attn.q)
    np.testing.assert_array_equal(ours, trained.reshape(48, 64).T)
    assert np.abs(ours - before).max() > 0


CHECKS: dict[str, Any] = {
    **{family: lambda family=family: check_family(family) for family in ("qwen2", "qwen3", "llama3")},
    "gemma3": check_gemma,
    "sampling": check_sampling,
    "compressed": check_compressed,
    "refused": check_refused,
    "grpo": check_grpo,
    "several": lambda: check_grpo(mesh(slice(2), 2, 1), mesh(slice(2), 2, 1)),
    "overlapping": lambda: check_grpo(mesh(slice(4), 2, 2), mesh(slice(2, 3), 1, 1)),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
        print(name, "ok", flush=True)
