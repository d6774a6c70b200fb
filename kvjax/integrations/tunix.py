"""kvjax as a rollout engine of Google's tunix (the package `google-tunix`).

    engine = kvjax.integrations.tunix.rollout_engine("rkv", 1024)
    cluster_config = tunix.ClusterConfig(rollout_engine=engine, ...)

Needs the `tunix` extra. `docs/howto/rollouts.md` explains the two kinds of log-probabilities.
"""

import math
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kvjax._util.arguments import amount
from kvjax._util.extras import optional
from kvjax.integrations.tunix_weights import Weights, config_of
from kvjax.models import Params
from kvjax.policies import Policy, get_policy
from kvjax.runtime.mesh import policy_shard
from kvjax.runtime.rollouts import Rollouts, Sample, answer_logprobs

AXES = {"fsdp": "data", "dp": "data", "data": "data", "tp": "model", "model": "model"}
"""kvjax's mesh axes, by tunix's."""


def rollout_engine(
    policy: str | Policy = "full",
    budget: int | float | None = None,
    *,
    rows: int | None = None,
    prefill_block: int | None = None,
) -> type[Any]:
    """Make a class for `rollout_engine` of tunix's `ClusterConfig`.

    tunix constructs it with its model, tokenizer, mesh and `RolloutConfig`. Of the latter it uses
    `max_tokens_to_generate`, `max_prompt_length`, `temperature`, `top_p`, `top_k`, `seed`, `eos_tokens`, `data_type` and
    `return_logprobs`. A temperature of 0 is greedy. Without `seed`, each call samples anew; with it, equal calls return
    equal samples. Tokens include a sampled end token.

    Args:
        policy, budget: as for `kvjax.generate`.
        rows: number of answers that are sampled at a time. By default as many as there are prompts in the first call.
        prefill_block: as for `kvjax.generate`.

    Returns:
        A subclass of `tunix.rl.rollout.base_rollout.BaseRollout`.

    Raises:
        ImportError: tunix is not installed. The message has the command that installs it.
        ValueError, PolicyError: the policy is unknown or does not take this budget, or `rows` is out of range.
    """
    get_policy(policy, budget=budget)
    if rows is not None:
        amount("rows", rows)
    if prefill_block is not None:
        amount("prefill_block", prefill_block)
    options = {"policy": policy, "budget": budget, "rows": rows, "prefill_block": prefill_block}
    return type("KVJaxRollout", (_rollout_class(),), {"options": options, "__doc__": f"kvjax's rollouts: {policy}."})


@cache
def _rollout_class() -> type[Any]:
    purpose = "kvjax as a rollout engine of tunix"
    base: Any = optional("tunix.rl.rollout.base_rollout", purpose, "tunix")
    adapter: Any = optional("tunix.generate.tokenizer_adapter", purpose, "tunix").TokenizerAdapter

    class KVJaxRollout(base.BaseRollout):
        """The engine; `rollout_engine` sets `options`."""

        options: dict[str, Any]

        def __init__(self, rollout_actor: Any, tokenizer: Any, mesh: Mesh, rollout_config: Any) -> None:
            config = config_of(rollout_actor)
            state = nnx.state(rollout_actor, nnx.Param)
            check_on_device(state)
            dtype = rollout_config.data_type or getattr(rollout_actor.config, "dtype", None)
            self._mesh = mesh_from(mesh)
            policy = get_policy(self.options["policy"], budget=self.options["budget"]).for_model(config)
            shard = policy_shard(self._mesh, config, policy)
            device = jax.devices()[0] if mesh.empty else mesh.devices.flat[0]
            self._weights = Weights(config, state, dtype or jax.tree.leaves(state)[0].dtype, shard, device)
            self._tokenizer = tokenizer if isinstance(tokenizer, adapter) else adapter(tokenizer)
            self._config = rollout_config
            self._rows: int | None = self.options["rows"]
            self._rollouts: Rollouts | None = None
            # Sizes that the policy cannot have are refused here. Nothing is compiled or allocated.
            self._made(
                1, rollout_config.max_prompt_length, rollout_config.max_tokens_to_generate, filters_of(rollout_config)
            )
            self._drawn = 0
            self._lock = threading.Lock()  # tunix's agents call from several threads

        def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
            """Sample one answer to each prompt."""
            if not prompts:
                raise ValueError("tunix: the list of prompts is empty; give at least one")
            ids = [self._encode(prompt) for prompt in prompts]
            length = padded_length(ids, rollout_config.max_prompt_length)
            new, filters = rollout_config.max_tokens_to_generate, filters_of(rollout_config)
            ends = list(rollout_config.eos_tokens or [self.eos_id()])
            with self._lock:
                seed = self._drawn if rollout_config.seed is None else seed_of(rollout_config.seed)
                self._drawn += len(ids)
                samples = sampled(
                    self._sized(len(ids), length, new, set(filters)),
                    ids,
                    max_new_tokens=new,
                    temperature=rollout_config.temperature,
                    seed=seed % 2**32,
                    eos_ids=ends,
                    **filters,
                )
            return base.RolloutOutput(
                text=[
                    self._tokenizer.decode([token for token in sample.tokens if token not in ends])
                    for sample in samples
                ],
                logits=None,
                tokens=[np.asarray(sample.tokens, np.int32) for sample in samples],
                left_padded_prompt_tokens=left_padded(ids, length, self.pad_id()),
                logprobs=[np.asarray(sample.logprobs, np.float32) for sample in samples]
                if rollout_config.return_logprobs
                else None,
            )

        def get_per_token_logps(
            self, prompt_tokens: Any, completion_tokens: Any, completion_mask: Any = None
        ) -> jax.Array:
            """Log-probabilities of completions with the full cache, [B, T], of logits / temperature.

            They are 0 where `completion_mask` [B, T] is 0, by default at padding tokens. Others do not attend there.
            """
            prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
            mask = answers != self.pad_id() if completion_mask is None else np.asarray(completion_mask) != 0
            if mask.shape != answers.shape:
                raise ValueError(
                    f"tunix: completion_mask has the shape {mask.shape}; give that of the completions, {answers.shape}"
                )
            found = np.zeros(answers.shape, np.float32)
            with self._lock:
                scores = answer_logprobs(
                    self._scoring(),
                    [row[row != self.pad_id()].tolist() for row in prompts],
                    [row[kept].tolist() for row, kept in zip(answers, mask, strict=True)],
                    self._config.temperature or 1.0,
                )
            for row, kept, score in zip(found, mask, scores, strict=True):
                row[kept] = score
            return jnp.asarray(found)

        def update_params(self, params: Any, filter_types: Any = None) -> None:
            """Use other weights. Nothing is compiled, and memory never holds two sets of kvjax's weights."""
            with self._lock:
                updated = self._weights.update(params)
                if self._rollouts is not None:
                    self._rollouts.update(updated)

        def pad_id(self) -> int:
            """The tokenizer's padding token."""
            return self._tokenizer.pad_id()

        def eos_id(self) -> int:
            """The tokenizer's end token."""
            return self._tokenizer.eos_id()

        def model(self) -> Params:
            """kvjax's weights. tunix compares them with those that it trains, and so knows that it has to pass on updates."""
            return self._weights.params

        def _encode(self, prompt: str) -> list[int]:
            start = self._tokenizer.bos_id()
            return self._tokenizer.dedup_bos_ids([*([start] if start else []), *self._tokenizer.encode(prompt)])

        def _scoring(self) -> Params:
            return self._weights.params if self._rollouts is None else self._rollouts.batches[0].weights

        def _sized(self, prompts: int, length: int, new: int, filters: set[str]) -> Rollouts:
            """The rollouts, made again if a call needs larger ones or other filters."""
            now = self._rollouts
            if now is not None:
                filters |= {name for name in now.batches[0].sampling if name != "temperature"}
                length, new = max(length, now.max_prompt_tokens), max(new, now.max_new_tokens)
                if (length, new) == (now.max_prompt_tokens, now.max_new_tokens) and filters <= now.batches[0].sampling:
                    return now
            self._rows = self._rows or prompts
            self._rollouts = self._made(self._rows, length, new, filters)
            return self._rollouts

        def _made(self, rows: int, length: int, new: int, filters: Collection[str]) -> Rollouts:
            return Rollouts(
                self._weights.params,
                self.options["policy"],
                self.options["budget"],
                rows=rows,
                max_prompt_tokens=length,
                max_new_tokens=new,
                filters=sorted(filters),
                scaled_logprobs=True,
                prefill_block=self.options["prefill_block"],
                mesh=self._mesh,
            )

    return KVJaxRollout


def sampled(rollouts: Rollouts, prompts: Sequence[Sequence[int]], **options: Any) -> list[Sample]:
    """One sample for each prompt. If all prompts occur equally often, as in GRPO's groups, each is prefilled once."""
    counts = Counter(tuple(prompt) for prompt in prompts)
    if len(set(counts.values())) > 1:
        return [sample for (sample,) in rollouts.generate(prompts, **options)]
    found = rollouts.generate([list(prompt) for prompt in counts], next(iter(counts.values())), **options)
    samples = {prompt: iter(group) for prompt, group in zip(counts, found, strict=True)}
    return [next(samples[tuple(prompt)]) for prompt in prompts]


def filters_of(config: Any) -> dict[str, Any]:
    """Filters that a `RolloutConfig` asks for. tunix's values for all tokens are no filters."""
    found: dict[str, Any] = {}
    if config.top_k is not None and config.top_k > 0:
        found["top_k"] = config.top_k
    if config.top_p is not None and config.top_p < 1:
        found["top_p"] = config.top_p
    return found


def padded_length(prompts: Sequence[Sequence[int]], length: int) -> int:
    """Length that prompts are padded to: the configured one or, for longer prompts, a power of two, as in tunix."""
    longest = max(map(len, prompts))
    return length if longest <= length else 1 << (longest - 1).bit_length()


def left_padded(prompts: Sequence[Sequence[int]], length: int, pad: int) -> np.ndarray:
    """Token ids [B, length] with padding on the left."""
    return np.asarray([[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts], np.int32)


def seed_of(seed: Any) -> int:
    """A whole number from a whole number or a JAX random key."""
    if isinstance(seed, int):
        return seed
    data = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    return int(np.asarray(data).ravel()[-1])


def check_on_device(state: Any) -> None:
    """Raise `ValueError` for weights in host memory."""
    for leaf in jax.tree.leaves(state):
        if leaf.sharding.memory_kind not in (None, next(iter(leaf.devices())).default_memory().kind):
            raise ValueError(
                f"tunix: the weights are in {leaf.sharding.memory_kind!r} memory. Offloading is not supported: set "
                "offload_to_cpu=False in ClusterConfig."
            )


def mesh_from(mesh: Mesh) -> Mesh | None:
    """kvjax's mesh over the devices of tunix's; None for one device.

    Raises:
        ValueError: an axis has no counterpart.
    """
    if mesh.size <= 1:
        return None
    sizes: dict[str, list[int]] = {"data": [], "model": []}
    for name, size in mesh.shape.items():
        if name in AXES:
            sizes[AXES[str(name)]].append(size)
        elif size > 1:
            raise ValueError(f"tunix: the mesh has an axis {name!r} of {size}. Use axes among {', '.join(AXES)}.")
    order = sorted(range(mesh.devices.ndim), key=lambda i: AXES.get(str(mesh.axis_names[i]), "data"))
    return Mesh(
        mesh.devices.transpose(order).reshape(math.prod(sizes["data"]), math.prod(sizes["model"])), ("data", "model")
    )
