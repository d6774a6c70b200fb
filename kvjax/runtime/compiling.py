"""Programs compiled ahead of time, for servers: what is compiled and what it takes is known before any request.

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
from kvjax.runtime.generation import Row, Run
from kvjax.runtime.request import Request, check_request, flag
from kvjax.runtime.sampling import Greedy, Sampling, make_sampler


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledGenerator:
    """Two programs for one model shape, policy, batch and length; made by `aot_compile`.

    Attributes:
        engine: has the programs.
        sampler: how tokens are sampled.
        eos_ids: token ids that end a row.
        memory: what the programs take.
        compile_seconds: time it took to compile them, little if they were found in the compilation cache.
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
        """Continue one prompt, or several; nothing is compiled.

        More prompts than the programs have rows run one batch after the other; where there are fewer, the rest idles.

        Args:
            params: weights of the shape and type that the programs are for.
            prompts: one, or a list; this, `seed` and `stop` as for `kvjax.generate`.
            max_new_tokens: most tokens to sample; by default as many as the programs were compiled for.

        Returns:
            As `kvjax.generate`: a `Generation`, or a list of them.

        Raises:
            ValueError: weights of another shape or type, a prompt that is too long, or more new tokens than there is room for.
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
        """What the programs are for and what they take, in a few lines."""
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
    """Compile what generation needs, ahead of time. Shapes are enough: no weights need be loaded, and none are touched.

    Args:
        model: weights, or the shape of a model alone.
        policy, budget: as for `generate`.
        batch: rows that run together.
        prompt_len: tokens of the longest prompt; prompts are padded to it, rounded up as `kvjax.cache.bucket` does.
        max_new_tokens: most tokens to sample in a row. With LongRoPE both numbers together choose the rotation.
        dtype: type of the weights; by default that of `model`, or bfloat16 for a shape.
        temperature, top_k, top_p, min_p, ignore_eos: as for `generate`.
        mesh: devices to run over, as for `kvjax.Engine`.

    Raises:
        ValueError: a number is out of range.
        PolicyError: the policy is unknown, or cannot work with this budget at this length.
    """
    prompt_len, max_new_tokens = amount("prompt_len", prompt_len), amount("max_new_tokens", max_new_tokens)
    sampler, ignored = make_sampler(temperature, top_k, top_p, min_p), flag("ignore_eos", ignore_eos)
    engine = Engine(
        model, policy, budget, batch=batch, prompt_len=prompt_len, max_new_tokens=max_new_tokens, dtype=dtype, mesh=mesh
    )
    memory = engine.compile(sampler)
    return CompiledGenerator(engine, sampler, () if ignored else engine.config.eos, memory, engine.compile_seconds)


class _Served(Run):
    """A run of compiled programs: as many rows and as long prompts as they are for, whatever is asked."""

    def __init__(self, engine: Engine, params: Params, prompt: Any, request: Request) -> None:
        self.engine = engine
        mesh = None if isinstance(engine.mesh, AbstractMesh) else engine.mesh  # nothing runs on an abstract one
        super().__init__(params, prompt, engine.policy, None, request, mesh=mesh, longest=engine.specs[0].prompt_len)

    def engine_for(self, rows: Sequence[Row]) -> Engine:
        return self.engine

    def most_tokens(self, row: Row) -> int:
        return self.request.max_new_tokens  # the programs have one rotation

    def groups(self) -> list[list[int]]:
        batch, rows = self.engine.batch, range(len(self.rows))
        return [list(rows[at : at + batch]) for at in range(0, len(rows), batch)]
