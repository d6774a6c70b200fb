"""`Rollouts`: many samples per prompt with weights that change between calls, for reinforcement learning.

    rollouts = Rollouts(params, "rkv", 1024, rows=256, max_prompt_tokens=512, max_new_tokens=4096)
    answers = rollouts.generate(prompts, samples=8, temperature=1.0)
    rollouts.update(new_params)

Log-probabilities of a sample are those under the policy that it was sampled from, whose cache is compressed.
`token_logprobs` computes them with the full cache.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util.arguments import amount, number, whole
from kvjax.cache import bucket
from kvjax.models import Params
from kvjax.models.sharding import along_data
from kvjax.policies import Policy, get_policy
from kvjax.runtime import logprobs
from kvjax.runtime.batch import Batch, Job, tokens_together
from kvjax.runtime.mesh import policy_shard
from kvjax.runtime.prompts import PromptLike, check_ids, refuse_rows, row_error, token_ids
from kvjax.runtime.request import check_request
from kvjax.runtime.row import Row
from kvjax.runtime.scheduler import Schedulers, Ticket

FILTERS = "top_k", "top_p", "min_p"
"""Filters that samples may have, see `kvjax.runtime.sampling.Sampling`."""


@dataclasses.dataclass(frozen=True, repr=False)
class Sample:
    """One sampled answer.

    Attributes:
        text: new text, without special tokens; None if the model has no tokenizer.
        tokens: new token ids, including a sampled end token.
        logprobs: log-probability of each token under the model with this policy's cache, before filters. It is before
            temperature too, unless the rollouts have `scaled_logprobs`.
        stop_reason: "eos" or "length".
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class Rollouts:
    """A running batch of fixed sizes, which samples answers again and again. Nothing is compiled after the first calls.

    Args:
        params: the weights.
        policy, budget: as for `kvjax.generate`.
        rows: number of answers that are sampled at a time.
        max_prompt_tokens: maximum length of a prompt in tokens.
        max_new_tokens: maximum number of tokens of an answer.
        filters: which filters calls of `generate` may use, of `FILTERS`. Each takes time in every step.
        scaled_logprobs: whether log-probabilities of samples are those of logits / temperature.
        prefill_block, mesh: as for `kvjax.generate`. Along an axis "data", devices have equal shares of the rows.

    Raises:
        ValueError, PolicyError: as for `kvjax.runtime.batch.Batch`.
    """

    def __init__(
        self,
        params: Params,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        *,
        rows: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        filters: Collection[str] = (),
        scaled_logprobs: bool = False,
        prefill_block: int | None = None,
        mesh: Mesh | str | None = None,
    ) -> None:
        unknown = [name for name in filters if name not in FILTERS]
        if unknown:
            raise ValueError(f"filters={list(filters)}: unknown {unknown[0]!r}; give some of {', '.join(FILTERS)}")
        self.params = params
        self.shard = policy_shard(mesh, params.config, get_policy(policy, budget=budget).for_model(params.config))
        self.max_prompt_tokens = amount("max_prompt_tokens", max_prompt_tokens)
        self.max_new_tokens = amount("max_new_tokens", max_new_tokens)
        parts = along_data(self.shard, params)
        self.batches = [
            Batch(
                weights,
                policy,
                budget,
                rows=-(-amount("rows", rows) // len(parts)),
                prompt_len=max_prompt_tokens,
                max_new_tokens=max_new_tokens,
                block=prefill_block,
                ends=max(len(params.config.eos), 8),
                sampling={"temperature", *filters},
                scaled_logprobs=scaled_logprobs,
                read_together=tokens_together(),
                mesh=devices,
            )
            for weights, devices in parts
        ]

    def update(self, params: Params) -> None:
        """Use other weights of the same shape and type from the next call on. Nothing is compiled.

        Weights that are on their devices are not copied.

        Raises:
            ValueError: the weights have another shape or type.
        """
        for batch, (weights, _) in zip(self.batches, along_data(self.shard, params), strict=True):
            batch.update(weights)
        self.params = params

    def generate(
        self,
        prompts: Sequence[PromptLike],
        samples: int = 1,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
        eos_ids: Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """Sample answers to a list of prompts. Each prompt is prefilled once.

        Args:
            prompts: a list of texts, token ids or chats.
            samples: number of answers per prompt. Sample j of prompt i has the seed `seed + i * samples + j`.
            max_new_tokens: maximum number of tokens of an answer. By default that of the constructor.
            temperature, top_k, top_p, min_p, seed, ignore_eos: as for `kvjax.generate`.
            eos_ids: end tokens; by default the model's.

        Returns:
            The answers of each prompt.

        Raises:
            ValueError: a prompt is invalid or too long, or an option is out of range or not among `filters`.
        """
        used = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, value in used.items():
            if value is not None and name not in self.batches[0].sampling:
                raise ValueError(
                    f"{name}={value}, but these rollouts have no such filter; make them with filters={[name]}"
                )
        new = self.max_new_tokens if max_new_tokens is None else amount("max_new_tokens", max_new_tokens)
        if new > self.max_new_tokens:
            raise ValueError(f"max_new_tokens={new}, but these rollouts are for {self.max_new_tokens} or fewer")
        request = check_request(self.params, new, temperature, **used, seed=seed, ignore_eos=ignore_eos)
        samples = whole("samples", samples, 1)
        ids, one = token_ids(self.params, prompts, longest=self.max_prompt_tokens)
        if one:
            raise ValueError("prompts is one prompt; give a list of prompts")
        ends = request.eos if eos_ids is None else tuple(eos_ids)
        scheduler = Schedulers(self.batches)
        tickets: list[list[Ticket]] = []
        for i, prompt in enumerate(ids):
            seeds = ((request.seed + i * samples + j) % 2**32 for j in range(samples))
            jobs = [Job(prompt, new, seed=own, ends=ends, sampler=request.sampler) for own in seeds]
            tickets.append(scheduler.submit_samples(jobs))
        try:
            while scheduler.busy:
                for ticket in scheduler.turn():
                    if ticket.error is not None:
                        raise ticket.error
        finally:
            for batch in self.batches:
                batch.free()
        tokenizer = self.params.tokenizer
        return [
            [
                Sample(
                    Row(prompt, [], tokenizer, request, tokens=ticket.tokens).text(),
                    ticket.tokens,
                    ticket.logprobs,
                    ticket.ended or "length",
                )
                for ticket in group
            ]
            for prompt, group in zip(ids, tickets, strict=True)
        ]

    def token_logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probabilities of given answers with the full cache, before filters.

        Args:
            prompts, answers: token ids. Only the prompt of an empty answer may be empty.
            temperature: number that logits are divided by.

        Returns:
            An array [len(answer)] for each pair.

        Raises:
            ValueError: there is not one answer per prompt, tokens are invalid, or `temperature` is not above 0.
        """
        return answer_logprobs(self.batches[0].weights, prompts, answers, temperature)


def answer_logprobs(
    params: Params, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[np.ndarray]:
    """As `Rollouts.token_logprobs`, for these weights. There is a program for each bucket of lengths."""
    longest, vocabulary = params.config.max_position, params.config.vocab_size
    number("temperature", temperature, lambda x: x > 0, "a number above 0")
    check_ids(answers, len(prompts), longest, vocabulary, "answer", 0)
    needed = [min(len(answer), 1) for answer in answers]
    refuse_rows(
        "prompt",
        [row_error(prompt, least, longest, vocabulary) for prompt, least in zip(prompts, needed, strict=True)],
    )
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if not len(answer):
            found.append(np.zeros(0, np.float32))
            continue
        size = len(prompt) + len(answer)
        tokens = np.zeros((1, bucket(size)), np.int32)
        tokens[0, :size] = [*prompt, *answer]
        scores = np.asarray(logprobs.token_logprobs(params, jnp.asarray(tokens), temperature))
        found.append(scores[0, len(prompt) - 1 : size - 1])
    return found
