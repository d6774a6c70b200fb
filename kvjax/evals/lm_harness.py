"""kvjax as a model of EleutherAI's lm-evaluation-harness, for its hundreds of tasks.

    python -m kvjax.evals.lm_harness run --model kvjax --model_args policy=chelsea,budget=0.2 --tasks lambada_openai

takes the arguments of the harness's own `lm_eval` command, which does not know this model. From Python, `register()` makes
`lm_eval.simple_evaluate(model="kvjax", model_args=…)` work. Needs the `lm-eval` extra.
"""

import dataclasses
import random
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util.extras import optional
from kvjax.cache import bucket
from kvjax.conversion import load, turns
from kvjax.conversion.tokenizer_source import TokenizerSource, find_tokenizer
from kvjax.models import Params
from kvjax.models.sharding import get_shard
from kvjax.policies import Full, Policy, get_policy
from kvjax.policies.unbound import check_unbound
from kvjax.runtime.generation import generate
from kvjax.runtime.logprobs import token_logprobs
from kvjax.runtime.mesh import on_mesh

from .following import following


@cache
def register() -> type[Any]:
    """Register the model with the harness as "kvjax", and return its class.

    Raises:
        ImportError: the harness is not installed.
    """
    optional(
        "lm_eval.models", "kvjax as a model of lm-evaluation-harness", "lm-eval"
    )  # first: it fills the registry if empty
    model = optional("lm_eval.api.model", "kvjax as a model of lm-evaluation-harness", "lm-eval")
    registry = optional("lm_eval.api.registry", "kvjax as a model of lm-evaluation-harness", "lm-eval")
    utils = optional("lm_eval.utils", "kvjax as a model of lm-evaluation-harness", "lm-eval")
    texts = optional("lm_eval.models.utils", "kvjax as a model of lm-evaluation-harness", "lm-eval")

    class KVJaxLM(model.TemplateLM):
        """A model with its cache kept by a policy.

        Prompts of `generate_until` are compressed with their question (question-aware), because the harness does not separate contexts from
        questions. Log-likelihoods are of continuations predicted from the compressed context (`kvjax.evals.following`). Rolling
        log-likelihoods use windows of the model's length, as the harness's own models do, but do not predict the BOS token that some
        tokenizers add.

        Unlike the harness's `hf` model, a context of white space counts as an empty one, and a continuation is tokenised alone if its
        tokens would merge with the context's; `hf` ends the run in both cases.

        Args:
            pretrained: a source for `kvjax.load`, or loaded `Params`; by default the default model.
            policy, budget, settings: as for `kvjax.get_policy`.
            dtype: type of the weights.
            tokenizer: as for `kvjax.load`.
            batch_size: requests that run together.
            max_length: maximum number of tokens of context and continuation; by default the model's window.
            max_gen_toks: maximum number of generated tokens, if a task sets none.
            seed: random seed of sampling; None takes Python's global random state, which the harness's `--seed` sets. The n-th request
                samples with `seed + n`, so repeated requests differ, and results do not depend on `batch_size`. A `seed` among a
                task's generation arguments takes its place.
            mesh: devices to run over, of one process, as for `kvjax.Engine`. `--model_args` takes it as JSON, '{"mesh": "data=2,model=4"}',
                because commas separate arguments there.
        """

        def __init__(
            self,
            pretrained: str | Params | None = None,
            policy: str | Policy = "full",
            budget: int | float | None = None,
            dtype: str | None = None,
            tokenizer: TokenizerSource | None = None,
            batch_size: int | str = 4,
            max_length: int | None = None,
            max_gen_toks: int = 256,
            seed: int | None = None,
            mesh: Mesh | str | None = None,
            device: str | None = None,
            max_batch_size: int | None = None,
            **settings: Any,
        ) -> None:
            super().__init__()
            if not str(batch_size).isdecimal() or int(batch_size) < 1:
                raise ValueError(f"batch_size={batch_size!r}; give a number, 1 or more")
            for name, value, least in (("max_length", max_length, 2), ("max_gen_toks", max_gen_toks, 1)):
                if value is not None and (not isinstance(value, int) or value < least):
                    raise ValueError(f"{name}={value!r}; give a whole number, {least} or more")
            self.policy = get_policy(policy, budget=budget, **settings)
            check_unbound(self.policy, over_mesh=mesh is not None)
            given = (
                pretrained
                if isinstance(pretrained, Params)
                else load(pretrained, dtype=dtype, tokenizer=tokenizer, mesh=mesh)
            )
            if tokenizer is not None and given is pretrained:
                given = dataclasses.replace(given, tokenizer=find_tokenizer(tokenizer)(given.config))
            self.params, over = on_mesh(given, mesh, self.policy)
            self._together = get_shard(over, given.config).data  # requests are sharded over as many devices
            if self.params.tokenizer is None:
                raise ValueError(
                    "this model has no tokenizer, so it cannot be given the harness's tasks; load one that has"
                )
            self.batch_size = int(batch_size)
            self.max_length = self.params.config.context_length if max_length is None else max_length
            self.max_gen_toks = max_gen_toks
            self.seed = _global_seed() if seed is None else int(seed)
            self._requests = 0

        @property
        def eot_token_id(self) -> int:
            return self.params.config.eos[0]

        @property
        def prefix_token_id(self) -> int:
            bos = self.params.tokenizer.bos
            return self.eot_token_id if bos is None else bos

        @property
        def tokenizer_name(self) -> str:
            """The key of the harness's cache of prompts."""
            return f"kvjax-{self.params.tokenizer.digest.hex()[:16]}"

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """Render a conversation; without a generation prompt, the last message is left open, so that the model continues it."""
            try:
                return self._rendered(chat_history, add_generation_prompt)
            except ValueError as error:
                others = [message for message in chat_history if message["role"] != "system"]
                if self.params.tokenizer.chat_template is None or len(others) == len(chat_history):
                    raise
                text = self._rendered(others, add_generation_prompt)
                warnings.warn(f"the system message is left out: {error}", stacklevel=2)
                return text

        def _rendered(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
            tokenizer = self.params.tokenizer
            return (
                tokenizer.render(chat_history) if add_generation_prompt else turns.unfinished(tokenizer, chat_history)
            )

        def chat_template(self, chat_template: bool | str = False) -> str:
            return (self.params.tokenizer.chat_template or "") if chat_template else ""

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            special = add_special_tokens is not False
            bos = self.params.tokenizer.decode([self.prefix_token_id], skip_special=False)
            return self.params.tokenizer.encode(string, add_special=special and not (bos and string.startswith(bos)))

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            ahead, following = super()._encode_pair(context, continuation)
            if not following:  # its tokens merge with the context's
                following = self.tok_encode(continuation, add_special_tokens=False)
            return ahead or [self.prefix_token_id], following

        def _loglikelihood_tokens(self, requests: Iterable[Any], **options: Any) -> list[tuple[float, bool]]:
            pairs = []
            for _, context, continuation in requests:
                if len(continuation) > self.max_length:
                    raise ValueError(
                        f"a continuation has {len(continuation)} tokens, but max_length={self.max_length}; give a larger max_length"
                    )
                whole = [*context, *continuation][-(self.max_length + 1) :]
                split = max(1, len(whole) - len(continuation))
                pairs.append((whole[:split], whole[split:]))
            found = following(self.params, self.policy, pairs, self.batch_size)
            return [(each.logprob, each.greedy) for each in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows = [list(map(utils.make_disjoint_window, self._windows(request.args[0]))) for request in requests]
            if self.policy == Full():  # one pass per window gives the same, faster
                return [sum(_likelihood(self.params, *window) for window in each) for each in windows]
            pairs = [pair for each in windows for pair in each]
            scores = iter(following(self.params, self.policy, pairs, self.batch_size))
            return [sum(next(scores).logprob for _ in each) for each in windows]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            groups: dict[Any, list[int]] = {}
            prompts = [self.tok_encode(request.args[0]) for request in requests]
            for i, request in enumerate(requests):
                groups.setdefault((repr(request.args[1]), bucket(len(prompts[i]))), []).append(i)
            answers: dict[int, str] = {}
            size = -(-self.batch_size // self._together) * self._together
            for group in groups.values():
                options = self._options(requests[group[0]].args[1])
                most = self.max_length - options["max_new_tokens"]
                if most < 1:
                    raise ValueError(
                        f"max_gen_toks={options['max_new_tokens']} leaves no room in {self.max_length} tokens"
                    )
                given = [prompts[i][-most:] for i in group]
                first = options.pop("seed") + self._requests
                options |= {"seed": [first + i for i in group], "rows": min(size, len(group))}
                results = generate(self.params, given, policy=self.policy, **options)
                for i, result in zip(group, results, strict=True):
                    # The new tokens are decoded alone, as the harness's `hf` model does: some tokenizers then drop a leading space.
                    text = self.params.tokenizer.decode(result.tokens)
                    answers[i] = texts.postprocess_generated_text(text, options["stop"], None)
            self._requests += len(requests)
            return [answers[i] for i in range(len(requests))]

        def _windows(self, text: str) -> Any:
            return utils.get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),  # the prefix token is the text's BOS
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )

        def _options(self, given: dict[str, Any]) -> dict[str, Any]:
            """The harness's generation arguments as those of `kvjax.generate`."""
            asked = texts.normalize_gen_kwargs(given, self.max_gen_toks)
            sampled = asked.pop("do_sample")
            temperature = float(asked.pop("temperature", 1.0))
            filters = {name: asked.pop(name, None) for name in ("top_k", "top_p", "min_p")}
            options = {
                "max_new_tokens": asked.pop("max_gen_toks"),
                "stop": [string for string in asked.pop("until") if string],
                "temperature": temperature if sampled else 0.0,
                "seed": self.seed if (seed := asked.pop("seed", None)) is None else int(seed),
            }
            if asked:
                warnings.warn(f"generation arguments that kvjax does not have are ignored: {asked}", stacklevel=2)
            # transformers' top_k=0 is no filter.
            return options | (filters | {"top_k": filters["top_k"] or None} if sampled else {})

    registry.register_model("kvjax")(KVJaxLM)
    return KVJaxLM


def _global_seed() -> int:
    """A number that follows from Python's global random state, which stays as it is."""
    copied = random.Random()
    copied.setstate(random.getstate())
    return copied.getrandbits(31)


def _likelihood(params: Params, context: list[int], continuation: list[int]) -> float:
    """Log-probability of the continuation in one pass, without a cache; padded so that a few programs serve all lengths."""
    tokens = [*context, *continuation]
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    scores = np.asarray(token_logprobs(params, jnp.asarray(padded)))[0]
    return float(np.sum(scores[len(context) - 1 : len(tokens) - 1], dtype=np.float64))


if __name__ == "__main__":
    register()
    optional("lm_eval.__main__", "kvjax as a model of lm-evaluation-harness", "lm-eval").cli_evaluate()
