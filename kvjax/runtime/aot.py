"""Ahead-of-time compilation for servers: programs and their memory are known before the first request.

server = kvjax.aot_compile(params, "treekv", budget=1024, batch=4, prompt_len=8192, max_new_tokens=512)
print(server.memory.peak)
server.generate(params, ["one prompt", "another"])
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from kvjax._util.arguments import amount, short
from kvjax.config import ModelConfig
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.engine import Engine, Memory
from kvjax.runtime.generation import Run
from kvjax.runtime.request import Request, check_request, flag
from kvjax.runtime.row import Row
from kvjax.runtime.sampling import Greedy, Sampling, make_sampler


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledGenerator:
    """Compiled programs for one model shape, policy, batch size and length. Made by `aot_compile`.

    Attributes:
        engine: the engine that owns the programs.
        sampler: how tokens are sampled.
        eos_ids: token ids that end a sequence.
        memory: device memory that the programs need.
        compile_seconds: compile time in seconds, which is short if the programs were in the compilation cache.
    """

    engine: Engine
    sampler: Greedy | Sampling
    eos_ids: tuple[int, ...]
    memory: Memory
    compile_seconds: float

    def generate(
        self,
        params: Params,
        prompts: Any,
        max_new_tokens: int | None = None,
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> Any:
        """Continue one prompt or several, without compiling.

        More prompts than the batch size run as several batches. With fewer prompts, the remaining rows idle.

        Args:
            params: weights of the shape and type that the programs were compiled for.
            prompts: one prompt or a list, as for `kvjax.generate`.
            max_new_tokens: maximum number of tokens to sample; by default the number that the programs were compiled
                for.
            seed, stop: as for `kvjax.generate`.

        Returns:
            A `Generation`, or a list of them for a list of prompts.

        Raises:
            ValueError: the weights have another shape or type, a prompt is too long, or `max_new_tokens` is too large.
        """
        most = self.engine.max_new_tokens
        asked = check_request(params, most if max_new_tokens is None else max_new_tokens, seed=seed, stop=stop)
        request = dataclasses.replace(asked, sampler=self.sampler, eos=self.eos_ids)
        if request.max_new_tokens > most:
            raise ValueError(
                f"max_new_tokens={request.max_new_tokens}, but the programs were compiled for {most}; compile for more"
            )
        return _Served(self.engine.of(params), params, prompts, request).finish()

    def __repr__(self) -> str:
        """Sizes and memory of the programs, in a few lines."""
        spec, engine = self.engine.specs[0], self.engine
        return (
            f"CompiledGenerator({engine.config.family}, {spec.dtype.name}, {self.sampler}, eos_ids={self.eos_ids},\n"
            f"  policy={short(engine.policy, 300)},\n"
            f"  batch={engine.batch}, prompt_len={spec.prompt_len}, max_new_tokens={engine.max_new_tokens},\n"
            f"  memory={self.memory}, compile_seconds={self.compile_seconds:.1f})"
        )


def aot_compile(
    model: Params | ModelConfig,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    *,
    batch: int = 1,
    prompt_len: int,
    max_new_tokens: int = 128,
    dtype: Any = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    ignore_eos: bool = False,
    mesh: Mesh | str | None = None,
) -> CompiledGenerator:
    """Compile the programs of generation ahead of time. Shapes are enough: weights need not be loaded.

    Args:
        model: weights, or a model's configuration.
        policy, budget: as for `kvjax.generate`.
        batch: number of sequences per batch.
        prompt_len: maximum prompt length in tokens. Prompts are padded to it, rounded up by `kvjax.cache.bucket`.
        max_new_tokens: maximum number of new tokens per sequence. With LongRoPE, `prompt_len + max_new_tokens` selects
            the rotation.
        dtype: type of the weights; by default that of `model`, or bfloat16 for a configuration.
        temperature, top_k, top_p, min_p, ignore_eos: as for `kvjax.generate`.
        mesh: devices to run on, as for `kvjax.Engine`.

    Returns:
        The compiled programs.

    Raises:
        ValueError: an argument is out of range.
        PolicyError: the policy is unknown, or does not support this budget at this length.

    Example:
        >>> server = kvjax.aot_compile(params, "snapkv:window=8", budget=16, prompt_len=48, max_new_tokens=8)
        >>> server.memory.peak > 0, len(server.generate(params, [5, 9, 2] * 16).tokens)
        (True, 8)
    """
    prompt_len, max_new_tokens = amount("prompt_len", prompt_len), amount("max_new_tokens", max_new_tokens)
    sampler, ignored = make_sampler(temperature, top_k, top_p, min_p), flag("ignore_eos", ignore_eos)
    engine = Engine(
        model, policy, budget, batch=batch, prompt_len=prompt_len, max_new_tokens=max_new_tokens, dtype=dtype, mesh=mesh
    )
    memory = engine.compile(sampler)
    return CompiledGenerator(engine, sampler, () if ignored else engine.config.eos, memory, engine.compile_seconds)


class _Served(Run):
    """A run on compiled programs, whose batch size and prompt length are fixed."""

    def __init__(self, engine: Engine, params: Params, prompt: Any, request: Request) -> None:
        self.engine = engine
        mesh = None if isinstance(engine.mesh, AbstractMesh) else engine.mesh  # nothing runs on an abstract mesh
        super().__init__(params, prompt, engine.policy, None, request, mesh=mesh, longest=engine.specs[0].prompt_len)

    def engine_for(self, rows: Sequence[Row]) -> Engine:
        return self.engine

    def runs_continuously(self) -> bool:
        return False

    def most_tokens(self, row: Row) -> int:
        return row.request.max_new_tokens  # the programs have only one rotation

    def groups(self) -> list[list[int]]:
        batch, rows = self.engine.batch, range(len(self.rows))
        return [list(rows[at : at + batch]) for at in range(0, len(rows), batch)]
