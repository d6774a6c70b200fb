"""DuoAttention: retrieval heads keep everything, and the other heads stream."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

from kvjax.cache import LayerSpec
from kvjax.config import ModelConfig

from .base import Policy
from .fields import check_fields
from .full import Full
from .info import PolicyError, PolicyInfo, not_bound
from .layer import CacheLayer
from .profile import HeadProfile, Labels, check_head_profile, find, missing
from .registry import register
from .streaming_llm import StreamingLayer, StreamingLLM
from .transforms.by_head import by_head

RETRIEVAL, STREAMING = "retrieval", "streaming"
"""Labels of heads in a profile."""

RAZOR = "razorattention"
"""The method of the other profile that classifies these heads."""


@dataclasses.dataclass(frozen=True)
class Streaming(StreamingLLM):
    """A streaming head: sinks and recent tokens at their original positions (Xiao et al. 2024, section 2.2)."""

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="duoattention_streaming",
        summary="the first tokens and the most recent ones",
        memory="freed",
        stage="both",
    )

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        return StreamingLayer(self, spec, rotated=True)


@register
@dataclasses.dataclass(frozen=True)
class DuoAttention(Policy):
    """Retrieval heads keep everything, streaming heads sinks and recent tokens (Xiao et al. 2024, section 2).

    `kvjax calibrate duoattention` learns a number α for each head: how much of the head's attention to the middle of a
    text the model needs. The heads with the smallest α stream, at original positions. Alternatively, `kvjax calibrate
    razorattention` finds retrieval heads by their attention to repeated random tokens (Tang et al. 2024,
    RazorAttention). Only its choice of heads is implemented, not its compensation token.

    Each layer has two caches of different shapes, so tokens that streaming heads drop occupy no memory. Prompts are
    prefilled with full attention in all heads. The published code does so for the first chunk of a prompt, and streams
    later chunks.

    Attributes:
        budget: slots of a streaming head: a number of tokens, or a fraction of prompt + new tokens. 320 is that of the
            published deployment. Its training uses 128 sinks and 256 recent tokens.
        sinks: first tokens that streaming heads keep. The rest of the budget is recent tokens.
        sparsity: share of streaming heads. None uses 0.5, or 0.75 in models whose heads share no keys (section 3.1), or
            the labels of a RazorAttention profile.
        profile: a `HeadProfile`, the path of one, or labels "retrieval" and "streaming" as [layer][head], which are
            used as they are. None uses the profile that comes with kvjax for the model, and "razorattention" the
            RazorAttention profile.
        retrieval: another policy for retrieval heads, such as `Quest()`. A policy with several kinds of heads, such as
            `CateKV()`, divides the retrieval heads among them.

    Example:
        >>> labels = (("retrieval", "streaming"),) * 2  # of two layers with two KV heads
        >>> policy = kvjax.DuoAttention(budget=64, sinks=4, profile=labels)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> round(policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes), 2)  # share of the full cache's bytes
        0.71
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="duoattention",
        paper="Xiao et al. 2024, DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        summary="in heads that retrieve, every token; in the others the first and the most recent ones",
        memory="freed",
        stage="both",
    )
    labels: ClassVar[tuple[str, ...]] = (RETRIEVAL, STREAMING)

    budget: int | float = 320
    sinks: int = 64
    sparsity: float | None = None
    profile: Labels | HeadProfile | str | None = None
    retrieval: Policy | None = None

    def __post_init__(self) -> None:
        check_fields(self, sinks=0)
        if self.sparsity is not None and not 0 <= self.sparsity <= 1:
            raise PolicyError(
                f"{self.info.name}: sparsity={self.sparsity} is out of range. Give a share of the heads from 0 to 1."
            )
        check_head_profile(self.info.name, self.profile)
        if isinstance(self.profile, tuple) and self.sparsity is not None:
            raise PolicyError(
                f"{self.info.name}: sparsity={self.sparsity} conflicts with labels of all heads. Give one of them."
            )

    def validate(self, tokens: int) -> None:
        self._streaming.validate(tokens)

    def bind(self, config: ModelConfig) -> Policy:
        """Return the policies of both kinds of heads, as a `ByHead`."""
        labels = self._labels(config)
        unknown = {label for layer in labels for label in layer} - set(self.labels)
        if unknown:
            raise PolicyError(
                f"{self.info.name}: the profile labels heads {sorted(unknown)}. Give {' or '.join(self.labels)}."
            )
        retrieval = Full() if self.retrieval is None else self.retrieval
        return by_head({RETRIEVAL: retrieval, STREAMING: self._streaming}, labels).bind(config)

    def layer(self, spec: LayerSpec) -> CacheLayer[Any]:
        raise not_bound(self.info)

    @property
    def _streaming(self) -> Streaming:
        return Streaming(self.budget, self.sinks)

    def _labels(self, config: ModelConfig) -> Labels:
        if isinstance(self.profile, tuple):
            return self.profile
        method = RAZOR if self.profile == RAZOR else self.info.name
        found = find(method, config, None if self.profile == RAZOR else self.profile, others=(RAZOR,))
        if found is None:
            raise missing(method, config)
        if found.method == RAZOR and self.sparsity is None:
            return found.labels
        shared = config.num_heads > config.num_kv_heads
        return head_labels(found.scores, (0.5 if shared else 0.75) if self.sparsity is None else self.sparsity)


def head_labels(scores: Sequence[Sequence[float]], sparsity: float) -> Labels:
    """Label the heads: those whose score is at least the `sparsity`-quantile of all retrieve (section 2.3).

    Among equal scores, the first heads of the first layers retrieve, so the number of heads is exact. (The published
    code adds a random 1e-6.)

    Args:
        scores: [layer][head].
        sparsity: share of heads that stream.
    """
    heads = [(score, -layer, -head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    # The quantile is at index sparsity · (n - 1) of the sorted scores. Scores before it are below it.
    count = math.ceil(Fraction(sparsity).limit_denominator(10_000) * (len(heads) - 1))
    streaming = {(-layer, -head) for _, layer, head in sorted(heads)[:count]}
    return tuple(
        tuple(STREAMING if (layer, head) in streaming else RETRIEVAL for head in range(len(row)))
        for layer, row in enumerate(scores)
    )
