"""Programs compiled ahead of time, for servers: what is compiled and what it takes is known before any request.

server = kvjax.aot_compile(params, "treekv", budget=1024, batch=4, prompt_len=8192, max_new_tokens=512)
print(server.memory.peak)
server.generate(params, ["one prompt", "another"])
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import short, shown, whole
from kvjax.cache import layer_specs
from kvjax.models import ModelConfig, Params, abstract
from kvjax.policies import Policy, get_policy
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Specs
from kvjax.runtime.generation import Generation, Row, Run
from kvjax.runtime.request import Request, check_request, flag
from kvjax.runtime.sampling import Greedy, Sampler, Sampling, make_sampler


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory in bytes, as the compiler tells it.

    Attributes:
        weights, cache: what stays: parameters, and the policy's cache.
        host_cache: of the cache, what is in the host's memory instead; not part of the others.
        prefill, decode: the most each program holds at a time: arguments, temporaries and results, weights included.
    """

    weights: int
    cache: int
    host_cache: int
    prefill: int
    decode: int

    @property
    def peak(self) -> int:
        """The most that generation holds at a time."""
        return max(self.prefill, self.decode)


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledGenerator:
    """Two programs for one model shape, policy, batch and length; made by `compile`.

    Attributes:
        config: the model's shape.
        policy: bound to it.
        specs: each layer's cache, which knows batch, prompt length (padded) and new tokens.
        sampler: how tokens are drawn.
        ends: token ids that end a row.
        prefill, decode: the executables; see `kvjax.runtime.decoding`.
        memory: what they take.
        compile_seconds: time it took to compile them, little if they were found in JAX's compilation cache.
    """

    config: ModelConfig
    policy: Policy
    specs: Specs
    sampler: Greedy | Sampling
    ends: tuple[int, ...]
    prefill: Any
    decode: Any
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
            max_new_tokens: most tokens to draw; by default as many as the programs have room for.

        Returns:
            As `kvjax.generate`: a `Generation`, or a list of them. A budget that is a fraction counts the new tokens that the programs have room for.

        Raises:
            ValueError: weights of another shape or type, a prompt that is too long, or more new tokens than there is room for.
        """
        room = self.specs[0].new_tokens
        asked = check_request(params, room if max_new_tokens is None else max_new_tokens, seed=seed, stop=stop)
        request = dataclasses.replace(asked, sampler=self.sampler, ends=self.ends)
        if request.max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens={request.max_new_tokens}, but the programs were compiled for {room}; compile for more"
            )
        if (params.config, params.dtype) != (self.config, self.specs[0].dtype):
            raise ValueError(
                f"these weights are a {params.config.family} model in {params.dtype.name}, the programs are for another shape or "
                f"type ({self.config.family}, {self.specs[0].dtype.name}); give the weights that they were compiled for"
            )
        run = _Served(self, params, prompts, request)
        for _ in run.chunks(decoding.CHUNK):
            pass
        generations = run.generations()
        return generations[0] if run.single else generations

    def __repr__(self) -> str:
        """What the programs are for and what they take, in a few lines."""
        spec = self.specs[0]
        return (
            f"CompiledGenerator({self.config.family}, {spec.dtype.name}, {self.sampler}, ends={self.ends},\n"
            f"  policy={short(self.policy, 300)},\n"
            f"  batch={spec.batch}, prompt_len={spec.prompt_len}, max_new_tokens={spec.new_tokens},\n"
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
) -> CompiledGenerator:
    """Compile what generation needs, ahead of time. Shapes are enough: no weights need be loaded, and none are touched.

    Args:
        model: weights, or the shape of a model alone.
        policy, budget: as for `generate`.
        batch: rows that run together.
        prompt_len: tokens of the longest prompt; prompts are padded to it, rounded up as `kvjax.cache.bucket` does.
        max_new_tokens: most tokens to draw in a row.
        dtype: type of the weights; by default that of `model`, or bfloat16 for a shape.
        temperature, top_k, top_p, min_p, ignore_eos: as for `generate`; they are part of the programs.

    Raises:
        ValueError: a number is out of range.
        PolicyError: the policy is unknown, or cannot work with this budget at this length.
    """
    batch, prompt_len, max_new_tokens = (
        whole(name, value, 1)
        for name, value in {"batch": batch, "prompt_len": prompt_len, "max_new_tokens": max_new_tokens}.items()
    )
    if not isinstance(model, ModelConfig | Params):
        raise ValueError(
            f"model is {shown(model)}; give a model's weights, such as kvjax.load(...) returns, or a ModelConfig"
        )
    config = model if isinstance(model, ModelConfig) else model.config
    sampler = make_sampler(temperature, top_k, top_p, min_p)
    ends = () if flag("ignore_eos", ignore_eos) else config.eos
    if dtype is None:
        dtype = jnp.bfloat16 if isinstance(model, ModelConfig) else model.dtype
    dtype = _floating(dtype)
    policy = get_policy(policy, budget=budget).bind(config)
    policy.validate(prompt_len + max_new_tokens)
    specs = layer_specs(config, batch, prompt_len, max_new_tokens, dtype)
    before = decoding.prefill.compile_seconds + decoding.decode.compile_seconds
    prefill, decode = executables(policy, specs, abstract(config, dtype), sampler, len(ends))
    seconds = decoding.prefill.compile_seconds + decoding.decode.compile_seconds - before
    held = config, batch, prompt_len, max_new_tokens, dtype
    memory = Memory(
        weights=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract(config, dtype))),
        cache=policy.nbytes(*held),
        host_cache=policy.host_nbytes(*held),
        prefill=program_bytes(prefill),
        decode=program_bytes(decode),
    )
    return CompiledGenerator(config, policy, specs, sampler, ends, prefill, decode, memory, seconds)


def _floating(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"dtype={dtype!r}; give a floating-point type, such as 'bfloat16' or 'float32'")
    return found


def executables(policy: Policy, specs: Specs, params: Params, sampler: Sampler, ends: int = 0) -> tuple[Any, Any]:
    """The prefill and decode programs, from shapes: calls of `decoding.prefill` and `decode` with arrays of these find them compiled.

    Args:
        policy: bound to the model.
        params: shapes of the weights, see `kvjax.models.abstract`.
        ends: how many token ids end a row.
    """
    rest = sampler, jax.ShapeDtypeStruct((ends,), jnp.int32)
    prompt = prompt_shapes(specs)
    prefill = decoding.prefill.compiled(policy, specs, params, *prompt, *rest)
    state = decoding.started(prefill, policy, specs, params, *prompt, *rest)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return prefill, decoding.decode.compiled(policy, specs, params, state, count, *rest)


def prompt_shapes(specs: Specs) -> tuple[Any, Any, Any]:
    """Shapes of a batch of prompts: tokens, lengths and seeds."""
    batch, size = specs[0].batch, specs[0].prompt_len
    return (
        jax.ShapeDtypeStruct((batch, size), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.uint32),
    )


def program_bytes(executable: Any) -> int:
    """The most device memory that a program holds: arguments, temporaries and results, what is shared counted once."""
    memory = executable.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


class _Served(Run):
    """A run of compiled programs: as many rows and as long prompts as they are for, whatever is asked."""

    def __init__(self, compiled: CompiledGenerator, params: Params, prompt: Any, request: Request) -> None:
        self.compiled = compiled
        super().__init__(params, prompt, compiled.policy, None, request)
        longest, room = max(len(row.prompt) for row in self.rows), compiled.specs[0].prompt_len
        if longest > room:
            raise ValueError(f"a prompt has {longest} tokens, but the programs take {room}; compile for longer ones")
        self.asked = len(self.rows)
        idle = -self.asked % compiled.specs[0].batch
        self.rows += [Row(self.rows[-1].prompt[:1], [], None, stop_reason="length") for _ in range(idle)]

    def generations(self) -> list[Generation]:
        del self.rows[self.asked :]
        return super().generations()

    def _new_tokens(self, row: Row) -> int:
        return self.compiled.specs[0].new_tokens

    def _longest(self, rows: Sequence[Row]) -> int:
        return self.compiled.specs[0].prompt_len

    def _groups(self) -> list[list[int]]:
        batch = self.compiled.specs[0].batch
        return [list(range(at, at + batch)) for at in range(0, len(self.rows), batch)]
