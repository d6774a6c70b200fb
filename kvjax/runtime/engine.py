"""A model with a policy's cache at given sizes: the programs compiled for them, what these take, and how to run them.

    engine = kvjax.Engine(params, "treekv", 1024, batch=2, prompt_len=8192, max_new_tokens=512)
    print(engine.compile().peak)
    state, _ = engine.prefill([[1, 2, 3], [4, 5]])
    state, tokens, _ = engine.decode(state, 32)

`kvjax.generate`, `stream`, `Session` and `aot_compile` are clients of it, and so are evaluation and benchmarks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int
from rich.filesize import decimal

from kvjax._util.any_rank import any_rank
from kvjax._util.arguments import MOST, amount, shown, whole, wholes
from kvjax.cache import LayerCache, bucket, layer_specs
from kvjax.config import ModelConfig
from kvjax.models import Params, abstract
from kvjax.models.params import retyped, same_shapes, without_text
from kvjax.models.sharding import bytes_per_device, get_mesh, get_shard, mesh_of, place_all
from kvjax.policies import Full, Policy, get_policy
from kvjax.policies.base import Layer, held_bytes
from kvjax.policies.capabilities import as_cache, check_reads_blocks
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.memory import memory_limit
from kvjax.runtime.mesh import dealt_caches, on_host, policy_shard, repeated_bytes
from kvjax.runtime.origin import Origin, check_same_origin, sample_of
from kvjax.runtime.program import Program
from kvjax.runtime.prompts import check_ids, refuse_rows, row_error
from kvjax.runtime.replay import words_of
from kvjax.runtime.sampling import Greedy, Sampler


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory in bytes, of each device of a mesh, as the compiler tells it.

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


class Engine:
    """Runs a batch of rows with a policy's cache; its programs are compiled when they are first needed, or by `compile`.

    Sizes are rounded up (`kvjax.cache.bucket`), prompts' and new tokens' alike, and engines of equal sizes share their programs: so
    a few serve a sweep over lengths, temperatures and filters. Rounding changes how many slots there are, and nothing else: what
    fractional budgets are fractions of is each row's own number of tokens.

    Args:
        model: weights, or the shape of a model alone, which can be compiled for but not run (see `of`).
        policy, budget: as for `kvjax.generate`.
        batch: rows that run together.
        prompt_len: tokens of the longest prompt; 0 for rows that begin with an empty cache, see `begin`.
        max_new_tokens: the most tokens that follow in any row, read and sampled together.
        max_total_tokens: the most tokens that any row has in all, where that is fewer than both together. Models with LongRoPE have one
            rotation for up to their original window, and another one for more: this number chooses it, for all that the engine runs.
        block: read prompts so many tokens at a time (see `begin` and `extend`), so that no memory is needed for the whole of one.
        dtype: type of the weights; by default that of `model`, or bfloat16 for a shape.
        mesh: devices to run over: a `jax.sharding.Mesh` with some of the axes "data", along which rows are dealt, "model", along which KV
            heads, matrices and the vocabulary are, and "sequence", along which slots of the cache are, and again matrices and the vocabulary; or
            text such as "data=2,model=4". Where there are fewer KV heads than devices to share them, several along "model" hold the same
            heads. Where the policy's caches are not alike in all heads (`PolicyInfo.joint_heads`), all do, and share slots. Of caches
            whose slots cannot be dealt, those that share them hold the same (`repeated_cache_bytes`).
            By default weights that lie on a mesh run there. With an `AbstractMesh` it tells bytes, and runs nothing.

    Attributes:
        config: the model's shape.
        policy: bound to it.
        specs: what is static about each layer's cache, on each device.
        mesh: the devices, by the axes "data", "model" and "sequence"; an abstract one as it was given; None for one device.
        shard: how they share the model with this policy's cache.
        weights: without their tokenizer, which is no part of a program; of a shape, shapes. They are where the mesh wants them.

    Raises:
        ValueError: a number is out of range, or the mesh has other axes, or sizes that the model or the rows cannot be dealt by.
        PolicyError: the policy is unknown, cannot work with this budget at this length, cannot read in blocks and is to, or has its cache
            in the host's memory and is to run over a mesh.
    """

    def __init__(
        self,
        model: Params | ModelConfig,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        *,
        batch: int = 1,
        prompt_len: int,
        max_new_tokens: int = 128,
        max_total_tokens: int | None = None,
        block: int | None = None,
        dtype: Any = None,
        mesh: Mesh | AbstractMesh | str | None = None,
    ) -> None:
        if not isinstance(model, ModelConfig | Params):
            raise ValueError(
                f"model is {shown(model)}; give a model's weights, such as kvjax.load(...) returns, or a ModelConfig"
            )
        batch = amount("batch", batch)
        prompt_len = amount("prompt_len", prompt_len, 0)
        self.max_new_tokens = amount("max_new_tokens", max_new_tokens, 0 if prompt_len else 1)
        if prompt_len + self.max_new_tokens > MOST:
            raise ValueError(
                f"prompt_len={prompt_len} and max_new_tokens={self.max_new_tokens} are more tokens together than positions count; give {MOST} or "
                "fewer"
            )
        total = prompt_len + self.max_new_tokens
        if max_total_tokens is not None:
            total = amount("max_total_tokens", max_total_tokens)
        if isinstance(model, Params):
            self.config, self.weights = model.config, without_text(model)
            if dtype is not None and _floating(dtype) != model.dtype:
                self.weights = retyped(self.weights, _floating(dtype))
        else:
            self.config = model
            self.weights = without_text(abstract(model, _floating(jnp.bfloat16 if dtype is None else dtype)))
        self.policy = get_policy(policy, budget=budget).bind(self.config)
        self.policy.validate(prompt_len + self.max_new_tokens)
        block = 0 if block is None else min(amount("block", block), bucket(prompt_len))
        self.mesh = (
            mesh_of(self.weights) if mesh is None else mesh if isinstance(mesh, AbstractMesh) else get_mesh(mesh)
        )
        if isinstance(self.mesh, AbstractMesh):
            self.weights = jax.eval_shape(lambda weights: weights, self.weights)
        self.shard = policy_shard(self.mesh, self.config, self.policy)
        if batch % self.shard.data:
            raise ValueError(
                f"batch={batch}, but the mesh deals rows to {self.shard.data} devices; give a multiple of {self.shard.data}"
            )
        specs = layer_specs(self.config, batch, prompt_len, self.max_new_tokens, self.weights.dtype, total, block)
        self.specs = tuple(spec.on(self.shard) for spec in specs)
        words = words_of(self.layers, model.tokenizer if isinstance(model, Params) else None)
        self.specs = tuple(dataclasses.replace(spec, words=words) for spec in self.specs)
        if self.shard.mesh is not None:
            self.weights = place_all(self.shard, self.weights)
        if block:
            for layer in self.layers:
                check_reads_blocks(layer)
        self._shape = self.config, batch, prompt_len, self.max_new_tokens, self.weights.dtype
        self.compile_seconds = 0.0

    @property
    def batch(self) -> int:
        """Rows that run together."""
        return self.specs[0].batch * self.shard.data

    @property
    def block(self) -> int:
        """Tokens of a block in which prompts are read; 0 if they are read whole."""
        return self.specs[0].block

    @property
    def layers(self) -> tuple[Layer[Any], ...]:
        """The policy's functions for each layer."""
        return decoding.layers_of(self.policy, self.specs)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache holds on the device; on each of a mesh."""
        return sum(held_bytes(layer)[0] for layer in self.layers)

    @property
    def full_cache_bytes(self) -> int:
        """Bytes that a full cache of these sizes would hold on the device; on each of a mesh."""
        shard = get_shard(self.mesh, self.config)
        layers = decoding.layers_of(Full(), [spec.whole.on(shard) for spec in self.specs])
        return sum(held_bytes(layer)[0] for layer in layers)

    @property
    def repeated_cache_bytes(self) -> int:
        """Of `cache_bytes`, what devices that share slots all hold alike."""
        return repeated_bytes(self.policy, self.specs)

    @property
    def dealt_caches(self) -> int:
        """How many caches have their slots dealt, each of which costs a step a communication: one per layer, or group of heads."""
        return dealt_caches(self.policy, self.specs)

    @property
    def host_cache_bytes(self) -> int:
        """Bytes that it holds in the host's memory."""
        return sum(held_bytes(layer)[1] for layer in self.layers)

    @property
    def step_bytes_read(self) -> int:
        """Bytes of the cache that a decoding step reads."""
        return sum(layer.bytes_read for layer in self.layers)

    def of(self, params: Params) -> "Engine":
        """This engine with other weights, of the same shape and type: nothing is compiled again.

        Raises:
            ValueError: they are of another shape or type, or the policy has the model read words of another tokenizer.
        """
        weights = without_text(params)
        if self.shard.mesh is not None:
            weights = place_all(self.shard, weights)
        if params.config != self.config or not same_shapes(weights, self.weights):
            raise ValueError(
                f"these weights are a {params.config.family} model in {params.dtype.name}, the programs are for another shape or "
                f"type ({self.config.family}, {self.weights.dtype.name}); give the weights that they were compiled for"
            )
        if words_of(self.layers, params.tokenizer) != self.specs[0].words:
            raise ValueError(
                f"{self.policy.info.name} has the model read words, and these programs were compiled without this tokenizer's; "
                "compile with the weights"
            )
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__, weights=weights)
        other.__dict__.pop("_origin", None)  # it has a sample of the weights
        return other

    def compile(self, sampler: Sampler | None = None) -> Memory:
        """Have the programs that read prompts and decode compiled, and tell what they take.

        Args:
            sampler: how tokens will be sampled; greedily by default. Its numbers do not matter, its filters do.
        """
        prefill, decode = self.executables(sampler=sampler)
        return Memory(
            weights=bytes_per_device(self.weights),
            cache=self.cache_bytes,
            host_cache=self.host_cache_bytes,
            prefill=program_bytes(prefill),
            decode=program_bytes(decode),
        )

    def executables(
        self, state: Decoding | None = None, sampler: Sampler | None = None, given: int | None = None
    ) -> tuple[Any, Any]:
        """The programs that read prompts and decode, compiled.

        Args:
            state: shapes of what decoding begins with; then there is None in place of the other program.
            sampler: as for `compile`.
            given: tokens, padding included, that are read before decoding, as by `answering`; then its program is the second.
        """
        rows, count = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((self.batch,), ()))
        how, prefill = self.how(sampler, ()), None
        if state is None:
            prefill, state = self.reading(sampler)
        if given is None:
            return prefill, self._compiled(decoding.decode, state, count, *how)
        tokens = jax.ShapeDtypeStruct((self.batch, given), jnp.int32)
        return prefill, self._compiled(decoding.answer, state, tokens, rows, count, *how)

    def reading(self, sampler: Sampler | None = None) -> tuple[Any, Decoding]:
        """The program that reads prompts, compiled, and shapes and places of the state that it leaves.

        Args:
            sampler: as for `compile`.
        """
        size = self.block or self.specs[0].prompt_len
        tokens, rows, seeds = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((self.batch, size), jnp.int32),
                ((self.batch,), jnp.int32),
                ((self.batch,), jnp.uint32),
            )
        )
        how = self.how(sampler, ())
        if self.block:
            state = decoding.begin.shapes(self.policy, self.specs, seeds, rows)
            return self._compiled(decoding.extend, state, tokens, rows, rows, *how), state
        prompt = (tokens, rows, rows, seeds)
        prefill = self._compiled(decoding.prefill, *prompt, *how)
        return prefill, decoding.started(prefill, self.policy, self.specs, self.weights, *prompt, *how)

    def begin(self, total: Sequence[int] | None = None, seeds: Sequence[int] | None = None) -> Decoding:
        """The state of rows that have read nothing yet.

        Args:
            total: as for `extend`.
            seeds: as for `prefill`.

        Raises:
            ValueError: there is not one whole number per row.
        """
        self._check_memory()
        return self._own(decoding.empty(self.policy, self.specs, self._seeds(seeds), self._total(total)))

    def prefill(
        self,
        prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"],
        new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        sampler: Sampler | None = None,
        eos_ids: Sequence[int] = (),
        progress: Callable[[int, int], Any] | None = None,
    ) -> tuple[Decoding, Float[Array, " B"]]:
        """Read a prompt per row, whole or in blocks, and sample the first token.

        Args:
            new_tokens: how many tokens will follow in each row, which fractional budgets count; by default all there is room for.
            seeds: of each row's samples; 0 by default.
            sampler: how tokens are sampled; greedily by default.
            eos_ids: tokens that end a row.
            progress: called with the blocks that have been read, and all of them, where there are blocks.

        Returns:
            The state, and the first tokens' log-probabilities under the model.

        Raises:
            ValueError: there are more or fewer prompts than rows, or some are empty, too long, or have token ids that are none of the
                model's; or there is not one whole number per row.
        """
        check_ids(prompts, self.batch, self.specs[0].prompt_len, self.config.vocab_size)
        lengths = [len(prompt) for prompt in prompts]
        new = [self.max_new_tokens] * self.batch
        if new_tokens is not None:
            new = wholes("new_tokens", new_tokens, self.batch, 0)
        total = self._totals([length + more for length, more in zip(lengths, new, strict=True)], "new_tokens")
        self._check_memory()
        if not self.block:
            given = *decoding.padded(prompts, self.specs[0].prompt_len), self._total(total), self._seeds(seeds)
            state, logprobs = self.ready(decoding.prefill, *given, *self.how(sampler, eos_ids))()
            return self._own(state), logprobs
        state, logprobs = self.begin(total, seeds), jnp.zeros(self.batch, jnp.float32)
        count = -(-max(lengths) // self.block)
        for i, tokens in enumerate(blocks(prompts, self.block)):
            state, logprobs = self._extending(state, tokens, total, sampler, eos_ids)()
            if progress is not None:
                jax.block_until_ready(logprobs)
                progress(i + 1, count)
        return state, logprobs

    def extend(
        self,
        state: Decoding,
        tokens: Sequence[Sequence[int]],
        total: Sequence[int] | None = None,
        sampler: Sampler | None = None,
        eos_ids: Sequence[int] = (),
    ) -> tuple[Decoding, Float[Array, " B"]]:
        """Read a block of a text into each row's cache, and sample the token after it; see `decoding.extend`. The state is used up.

        Args:
            tokens: of each row up to `block`; none for a row that is to stay as it is.
            total: tokens that each row will reach, which fractional budgets are fractions of; by default all there is room for.
            sampler, eos_ids: as for `prefill`.

        Returns:
            The state, and the sampled tokens' log-probabilities.

        Raises:
            ValueError: the engine was not made to read in blocks; the state is of another engine; there are more or fewer rows than the
                engine has; or some blocks are too long, or have token ids that are none of the model's.
            RuntimeError: the state has been used up.
        """
        return self.extending(state, tokens, total, sampler, eos_ids)()

    def extending(
        self,
        state: Decoding,
        tokens: Sequence[Sequence[int]],
        total: Sequence[int] | None = None,
        sampler: Sampler | None = None,
        eos_ids: Sequence[int] = (),
    ) -> Callable[[], tuple[Decoding, Float[Array, " B"]]]:
        """Compile, if need be, what `extend` runs with these arguments. Calling it uses the state up."""
        self._check(state)
        if not self.block:
            raise ValueError("this engine reads prompts whole; make the engine with block=, such as 512")
        check_ids(tokens, self.batch, self.block, self.config.vocab_size, "block", least=0)
        room = self.specs[0].prompt_len
        read = on_host(state.pos) - on_host(state.steps)
        longest = max(int(before) + len(row) for before, row in zip(read, tokens, strict=True))
        if longest > room:
            raise ValueError(
                f"with these blocks a prompt has {longest} tokens, and this engine has room for {room}; make one with larger prompt_len"
            )
        if total is not None:
            total = self._totals(wholes("total", total, self.batch, 0), "total")
        return self._extending(state, tokens, total, sampler, eos_ids)

    def decode(
        self, state: Decoding, count: int, sampler: Sampler | None = None, eos_ids: Sequence[int] = ()
    ) -> tuple[Decoding, Int[Array, "B M"], Float[Array, "B M"]]:
        """Sample up to `count` more tokens per row; see `decoding.decode`. The state is used up.

        Args:
            count: at most what `max_new_tokens` leaves: each of them is preceded by one that is read into the cache.
            sampler, eos_ids: as for `prefill`.

        Returns:
            The state, tokens and log-probabilities, of which as many columns are filled as `state.steps` grew by. There are `decoding.CHUNK`
            columns for each `decoding.CHUNK` tokens that were asked for, or part of them.

        Raises:
            ValueError: the state is of another engine, or there is no room for so many tokens.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        left = whole("count", count, 0)
        self._check_room(state, left)
        how, parts = self.how(sampler, eos_ids), []
        while left > 0 or not parts:
            state, *part = self._going_on(
                decoding.decode, state, jnp.asarray(min(left, decoding.CHUNK), jnp.int32), *how
            )()
            parts.append(part)
            left -= decoding.CHUNK
        tokens, logprobs = (
            parts[0] if len(parts) == 1 else (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        )
        return state, tokens, logprobs

    def answering(
        self,
        state: Decoding,
        given: Sequence[Sequence[int]],
        count: int,
        sampler: Sampler | None = None,
        eos_ids: Sequence[int] = (),
        size: int | None = None,
    ) -> Callable[[], tuple[Decoding, Int[Array, "B M"], Float[Array, "B M"]]]:
        """Compile, if need be, what reads given tokens and goes on from there; see `decoding.answer`. Calling it uses the state up.

        Args:
            given: tokens to read in each row, one at least.
            count: tokens to sample after the longest of them, from 1 to `decoding.CHUNK`; `decode` samples more.
            size: what they are padded to; by default a bucket.

        Raises:
            ValueError: the state is of another engine; or there is no room for so many tokens; or there are more or fewer rows than the
                engine has; or some are empty, too long, or have token ids that are none of the model's.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        size = None if size is None else whole("size", size, 1)
        check_ids(given, self.batch, self.max_new_tokens if size is None else size, self.config.vocab_size, "given row")
        count = whole("count", count, 1)
        if count > decoding.CHUNK:
            raise ValueError(f"count={count}; give {decoding.CHUNK} or fewer, and have `decode` sample the others")
        self._check_room(state, max(map(len, given)) + count - 1)
        tokens = decoding.padded(given, size)
        return self._going_on(
            decoding.answer, state, *tokens, jnp.asarray(count, jnp.int32), *self.how(sampler, eos_ids)
        )

    def save(self, state: Decoding) -> Decoding:
        """A state as arrays of NumPy on the host, those of one device whatever the mesh; `resume` takes it, on this mesh or another.

        The state itself can still be used.

        Raises:
            ValueError: it is of another engine.
            RuntimeError: it has been used up.
        """
        self._check(state)
        saved = decoding.saved(self.policy, self.specs, state)
        return dataclasses.replace(saved, origin=dataclasses.replace(self._origin, shard=None))

    def resume(self, state: Decoding) -> Decoding:
        """What `save` gave, on this engine's devices.

        Raises:
            ValueError: it is of other sizes, or of another policy or model.
            RuntimeError: it has been used up.
        """
        decoding.check_state(state)
        resumed = decoding.resumed(self.policy, self.specs, _without_origin(state))
        if state.origin is not None:
            check_same_origin(dataclasses.replace(state.origin, shard=self.shard), self._origin)
        self._check_room(state, 0)
        refuse_rows(
            "row",
            [row_error([token], 1, 1, self.config.vocab_size) for token in on_host(state.token)],
        )
        return self._own(resumed)

    @any_rank
    def slots(self, state: Decoding) -> tuple[LayerCache, ...]:
        """What each layer keeps, in all its KV heads and rows, as one device has it; from a mesh it is brought to the host first.

        Raises:
            ValueError: the state is of another engine.
            RuntimeError: it has been used up.
        """
        self._check(state)
        caches = state.caches if self.shard.mesh is None else jax.tree.map(jnp.asarray, self.save(state).caches)
        layers = [self.policy.layer(spec.whole) for spec in self.specs]
        return tuple(as_cache(layer, cache) for layer, cache in zip(layers, caches, strict=True))

    def how(self, sampler: Sampler | None = None, eos_ids: Sequence[int] = ()) -> tuple[Sampler, Int[np.ndarray, " E"]]:
        """How tokens are sampled, as programs take it; arguments as for `prefill`.

        There are as many end tokens as the model has, and one at least, so that ignoring them is no other program; none is below 0.
        (An array without elements in a loop over a mesh ends JAX 0.11.2's process.) They are not on a device yet, so that a program can be
        compiled for one that is not here.
        """
        ids = wholes("eos_ids", eos_ids, None)
        ids += [-1] * (max(len(self.config.eos), 1) - len(ids))
        if sampler is not None and not callable(sampler):
            raise ValueError(
                f"sampler is {shown(sampler)}; give one of kvjax.runtime.sampling, or a function like them"
            )
        return Greedy() if sampler is None else sampler, np.asarray(ids, np.int32)

    def ready(self, program: Program, *args: Any) -> Callable[[], Any]:
        """A program of `decoding` for this model, policy and sizes, compiled if it has not been, that is run by calling it."""
        args = tuple(map(_without_origin, args))
        self._compiled(program, *args)
        return lambda: program(self.policy, self.specs, self.weights, *args)

    def _extending(
        self,
        state: Decoding,
        tokens: Sequence[Sequence[int]],
        total: Sequence[int] | None,
        sampler: Sampler | None,
        eos_ids: Sequence[int],
    ) -> Callable[[], tuple[Decoding, Float[Array, " B"]]]:
        """`extending` of what has been checked."""
        given = decoding.padded(tokens, self.block)
        return self._going_on(decoding.extend, state, *given, self._total(total), *self.how(sampler, eos_ids))

    def _going_on(self, program: Program, state: Decoding, *args: Any) -> Callable[[], Any]:
        """`ready` of a program that goes on from a state, and gives another one of this engine, and other results."""
        run = self.ready(program, state, *args)

        def going_on() -> Any:
            following, *rest = run()
            return self._own(following), *rest

        return going_on

    def _compiled(self, program: Program, *args: Any) -> Any:
        before = program.compile_seconds
        executable = program.compiled(self.policy, self.specs, self.weights, *map(_without_origin, args))
        self.compile_seconds += program.compile_seconds - before
        return executable

    def _check_memory(self) -> None:
        """Raise `ValueError` if the cache cannot fit into the memory that is here, before anything is compiled or allocated for it."""
        limit, spec = memory_limit(self.shard), self.specs[0]
        tokens = self.config.cache_bytes_per_token(spec.dtype.itemsize) * (spec.max_tokens + spec.block)
        if limit is None or 4 * spec.batch * tokens < limit:  # whatever the policy holds besides keys and values
            return
        held, weights = self.cache_bytes, bytes_per_device(self.weights)
        if held + weights > limit:
            raise ValueError(
                f"a cache of {decimal(held)} by {self.policy.info.name} and weights of {decimal(weights)} are more than the {decimal(limit)} of "
                "memory here; give fewer tokens or rows, a smaller budget, or another policy"
            )

    @functools.cached_property
    def _origin(self) -> Origin:
        """What states of this engine are known by."""
        specs = tuple(dataclasses.replace(spec.whole, block=0) for spec in self.specs)
        return Origin(self.policy, specs, self.config, self.shard, sample_of(self.weights))

    def _own(self, state: Decoding) -> Decoding:
        return dataclasses.replace(state, origin=self._origin)

    def _check(self, state: Any) -> None:
        """Raise unless a state is one of this engine's, or of an engine like it, and has not been used up."""
        decoding.check_state(state)
        if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.caches)):
            raise ValueError("this state is on the host, as `save` leaves it; give it to `resume` first")
        if state.origin is None:
            decoding.check_like(state, self._shapes)
        else:
            check_same_origin(state.origin, self._origin)

    @functools.cached_property
    def _shapes(self) -> Decoding:
        """Shapes of a state's arrays."""
        rows = (jax.ShapeDtypeStruct((self.batch,), dtype) for dtype in (jnp.uint32, jnp.int32))
        return decoding.begin.shapes(self.policy, self.specs, *rows)

    def _check_room(self, state: Decoding, reads: int) -> None:
        """Raise `ValueError` unless a state has room for so many tokens more."""
        read = int(on_host(state.steps))
        if read + reads > self.max_new_tokens:
            raise ValueError(
                f"{reads} more tokens after the {read} that follow the prompt are more than max_new_tokens={self.max_new_tokens} of this "
                f"engine; give {max(self.max_new_tokens - read, 0)} or fewer, or make an engine for more"
            )

    def _seeds(self, seeds: Sequence[int] | None) -> Any:
        found = [0] * self.batch if seeds is None else wholes("seeds", seeds, self.batch)
        return jnp.asarray(np.asarray([seed % 2**32 for seed in found], np.uint32))

    def _total(self, total: Sequence[int] | None) -> Int[Array, " B"]:
        if total is not None:
            total = self._totals(wholes("total", total, self.batch, 0), "total")
        return jnp.asarray([self.specs[0].max_tokens] * self.batch if total is None else total, jnp.int32)

    def _totals(self, total: list[int], name: str) -> list[int]:
        """Tokens that rows will reach, which the cache has room for."""
        room = self.specs[0].max_tokens
        if max(total) > room:
            raise ValueError(
                f"{name}: a row of {max(total)} tokens in all is longer than this engine has room for, {room}; give fewer, or make an engine for more"
            )
        return total


def _without_origin(value: Any) -> Any:
    """A state as programs take it; other values as they are."""
    return dataclasses.replace(value, origin=None) if isinstance(value, Decoding) else value


def blocks(prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"], size: int) -> Iterator[list[list[int]]]:
    """Prompts in blocks of `size` tokens, a list per row, which all end with the last; a row's first block is the one that is not full.

    So the tokens that a prompt ends with, by which many a method chooses, are together.
    """
    for left in range(max(-(-len(prompt) // size) for prompt in prompts), 0, -1):
        yield [
            list(prompt[max(len(prompt) - left * size, 0) : max(len(prompt) - (left - 1) * size, 0)])
            for prompt in prompts
        ]


def program_bytes(executable: Any) -> int:
    """The most device memory that a program holds: arguments, temporaries and results, what is shared counted once."""
    memory = executable.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _floating(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"dtype={dtype!r}; give a floating-point type, such as 'bfloat16' or 'float32'")
    return found
