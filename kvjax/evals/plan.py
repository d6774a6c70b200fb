"""The batches of a task and the sizes of their caches. The runner runs this plan, and `matched` chooses budgets by it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from kvjax.cache import bucket
from kvjax.cache.spec import LEAST_NEW_TOKENS
from kvjax.config import ModelConfig
from kvjax.models import Params, abstract
from kvjax.models.sharding import get_shard
from kvjax.policies import Policy
from kvjax.runtime.engine import Engine
from kvjax.runtime.generation import automatic_block
from kvjax.runtime.many import prefilled_at_once

from . import sessions
from .task import Example, Format


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of like sizes that run through the same rows.

    Attributes:
        prompt: tokens of the longest prompt; 0 for a text that is read token by token.
        new_tokens: maximum number of tokens that follow a prompt.
        rows: sequences that run at a time, idle ones included.
        examples: indices of the task's examples; of a text, just 0.
        session: whether they are the questions of one session, which share a cache.
    """

    prompt: int
    new_tokens: int
    rows: int = 1
    examples: tuple[int, ...] = (0,)
    session: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """All batches of a task on one model.

    Attributes:
        params: the model.
        batches: in the order in which they run.
        prefill_block: tokens of a block for chunked prefill; None to choose automatically, as `kvjax.generate` does.
        mesh: devices to run over.
    """

    params: Params
    batches: tuple[Batch, ...]
    prefill_block: int | None = None
    mesh: Mesh | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, new ones included."""
        return max(batch.prompt + batch.new_tokens for batch in self.batches)

    def block(self, policy: Policy, batch: Batch) -> int | None:
        """Tokens of a block in which a batch's prompts are prefilled; None for whole prompts."""
        if self.prefill_block is not None or batch.session or not batch.prompt:
            return self.prefill_block
        config = self.params.config
        policy = policy.for_model(config)
        shard = get_shard(self.mesh, config, heads_coupled=policy.info.heads_coupled)
        rows = prefilled_at_once(policy, config, batch.rows, batch.prompt)
        return automatic_block(self.params, policy, shard, rows, batch.prompt, batch.new_tokens)

    def row_bytes(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Bytes that each sequence of a batch holds on one device, whatever the mesh, by their names in result files.

        Raises:
            PolicyError: the policy cannot work with sequences of this length.
        """
        engine = Engine(
            self._shapes,
            policy,
            batch=batch.rows,
            prompt_len=batch.prompt,
            max_new_tokens=batch.new_tokens,
            block=self.block(policy, batch),
            mixed=False,
        )
        names = "cache_bytes", "host_cache_bytes", "full_cache_bytes"
        return {name: getattr(engine, name) / batch.rows for name in names}

    @functools.cached_property
    def _shapes(self) -> Params:
        """The model's shapes on one device, with its tokenizer: some policies keep the tokens of its chat template."""
        return abstract(self.params.config, self.params.dtype, self.params.tokenizer)

    def bytes_held(self, policy: Policy) -> float:
        """Bytes per example on device and host together, averaged over all examples.

        Raises:
            PolicyError: the policy cannot work with sequences of these lengths.
        """
        alike: dict[Any, tuple[Batch, int]] = {}
        for batch in self.batches:
            padded = bucket(batch.prompt), bucket(batch.new_tokens, LEAST_NEW_TOKENS), batch.rows, batch.session
            first, count = alike.get(padded, (batch, 0))
            alike[padded] = first, count + len(batch.examples)
        total = 0.0
        for batch, count in alike.values():
            held = self.row_bytes(policy, batch)
            total += count * (held["cache_bytes"] + held["host_cache_bytes"])
        return total / sum(count for _, count in alike.values())


def make_batches(
    config: ModelConfig, form: Format, examples: Sequence[Example], size: int, *, query_aware: bool, data: int = 1
) -> tuple[Batch, ...]:
    """Batches of examples of similar length; the examples of a session form a batch of their own.

    Args:
        size: examples that run at a time, a multiple of `data`.
        query_aware: whether questions are part of the prompts.
        data: devices along "data"; the rows of a batch are a multiple of it.
    """
    groups: dict[Any, list[int]] = {}
    together: dict[int, list[int]] = {}
    pairs = [form.encode(example) for example in examples]
    for i, (example, (context, question)) in enumerate(zip(examples, pairs, strict=True)):
        if example.session is not None:
            together.setdefault(example.session, []).append(i)
            continue
        # `generate` runs each rotation of LongRoPE alone
        rotation = config.resolve_ropes(len(context) + len(question))
        key = bucket(len(context)), bucket(len(question)), example.max_new_tokens, example.stop, rotation
        groups.setdefault(key, []).append(i)
    batches = []
    for group in groups.values():
        new_tokens, rows = examples[group[0]].max_new_tokens, min(size, -(-len(group) // data) * data)
        contexts, questions = ([len(pairs[i][part]) for i in group] for part in range(2))
        if query_aware:
            batch = Batch(max(map(sum, zip(contexts, questions, strict=True))), new_tokens, rows, tuple(group))
        else:
            batch = Batch(max(contexts), max(questions) + new_tokens, rows, tuple(group))
        batches.append(batch)
    for group in together.values():
        context, _, most = sessions.plan(form, [examples[i] for i in group])
        # A session prefills all but the context's last token, which it reads afterwards.
        batches.append(Batch(len(context) - 1, most + 1, 1, tuple(group), session=True))
    return tuple(batches)
