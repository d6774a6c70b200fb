"""`Engine`: a model and a policy at fixed sizes, with the compiled programs that prefill and decode.

    engine = kvjax.Engine(params, "treekv", 1024, batch=2, prompt_len=8192, max_new_tokens=512)
    print(engine.compile().peak)
    state, _ = engine.prefill([[1, 2, 3], [4, 5]])
    state, tokens, _ = engine.decode(state, 32)

`kvjax.generate`, `stream`, `Session`, `aot_compile`, evaluation and benchmarks are built on it.
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
from kvjax.cache import LayerCache, LayerSpec, Shard, bucket, layer_specs
from kvjax.config import ModelConfig
from kvjax.models import Params, abstract
from kvjax.models.params import retyped, same_shapes, without_text
from kvjax.models.sharding import bytes_per_device, get_mesh, get_shard, mesh_of, place_all
from kvjax.policies import Full, Policy, get_policy
from kvjax.policies.layer import CacheLayer, check_reads_blocks, held_bytes, kept_slots
from kvjax.runtime import decoding
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.memory import memory_limit
from kvjax.runtime.mesh import on_host, policy_shard, repeated_bytes, sharded_caches
from kvjax.runtime.origin import Origin, check_same_origin, sample_of
from kvjax.runtime.program import Program
from kvjax.runtime.prompts import check_ids, refuse_rows, row_error
from kvjax.runtime.replay import told
from kvjax.runtime.sampling import Greedy, Sampler
from kvjax.runtime.scoring import following_logits


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory in bytes on each device, according to XLA's memory analysis.

    Attributes:
        weights: bytes of the parameters.
        cache: bytes of the policy's cache.
        host_cache: bytes of the cache in host memory, not included in `cache`.
        prefill, decode: peak of each program: arguments including weights, temporaries and results.
    """

    weights: int
    cache: int
    host_cache: int
    prefill: int
    decode: int

    @property
    def peak(self) -> int:
        """Peak device memory of generation."""
        return max(self.prefill, self.decode)


class Engine:
    """Runs a batch with a policy's cache. Programs are compiled on first use, or by `compile`.

    Sizes are rounded up (`kvjax.cache.bucket`), and engines with equal rounded sizes share programs. A sweep over
    lengths, temperatures and filters therefore needs few programs. Rounding only adds unused slots: fractional budgets
    refer to each sequence's own number of tokens.

    Args:
        model: weights, or a model's configuration, for which programs can be compiled but not run (see `of`).
        policy, budget: as for `kvjax.generate`.
        batch: number of sequences.
        prompt_len: maximum prompt length in tokens; 0 to begin with an empty cache, see `begin`.
        max_new_tokens: maximum number of tokens after the prompt, given and sampled together.
        max_total_tokens: maximum length of any sequence, if less than `prompt_len + max_new_tokens`. With LongRoPE it
            selects one of two rotations for everything that the engine runs: up to the original window, or beyond.
        block: tokens per block of chunked prefill (see `begin` and `extend`), so that memory does not grow with the
            prompt. None prefills whole prompts.
        mixed: whether the prompt of a batch of one may be much shorter than `prompt_len`. Otherwise its length is rounded
            up to `prompt_len`, and some policies need less memory.
        dtype: type of the weights; by default that of `model`, or bfloat16 for a configuration.
        mesh: devices to run on: a `jax.sharding.Mesh`, or text such as "data=2,model=4". By default, weights that are
            on a mesh run there. With an `AbstractMesh` the engine only reports sizes. The axes are optional:
            "data" shards the batch.
            "model" shards KV heads, weight matrices and the vocabulary. With fewer KV heads than devices, several
            devices hold the same heads. If the policy couples heads (`PolicyInfo.heads_coupled`), devices along "model" all
            hold all heads, and share slots instead.
            "sequence" shards the slots of the cache, and also weight matrices and the vocabulary. Caches whose slots
            cannot be sharded are replicated (`repeated_cache_bytes`).

    Attributes:
        config: the model's configuration.
        policy: the policy, bound to the model.
        specs: static description of each layer's cache on each device.
        mesh: the mesh with axes "data", "model" and "sequence"; an abstract mesh as passed; None for one device.
        shard: how devices share the model with this policy's cache.
        weights: weights without tokenizer, placed on the mesh. Shapes if `model` is a configuration.

    Raises:
        ValueError: an argument is out of range, or the model or batch cannot be sharded over `mesh`.
        PolicyError: the policy is unknown, does not support this budget at this length, does not support chunked
            prefill, or keeps its cache in host memory, which a mesh does not support.

    Example:
        >>> engine = kvjax.Engine(params, "snapkv:window=8", 16, prompt_len=48, max_new_tokens=8)
        >>> state, logprobs = engine.prefill([[5, 9, 2] * 16])
        >>> state, tokens, logprobs = engine.decode(state, 8)
        >>> engine.cache_bytes < engine.full_cache_bytes
        True
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
        mixed: bool = True,
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
        self.policy = get_policy(policy, budget=budget).for_model(self.config)
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
                f"batch={batch}, but the mesh shards the batch over {self.shard.data} devices; give a multiple of {self.shard.data}"
            )
        specs = layer_specs(self.config, batch, prompt_len, self.max_new_tokens, self.weights.dtype, total, block)
        if mixed and batch == 1:
            specs = tuple(dataclasses.replace(spec, mixed=True) for spec in specs)
        self.specs = _specs_on(specs, self.shard)
        words = told(self.layers, model.tokenizer if isinstance(model, Params) else None)
        if any(words.values()):
            self.specs = tuple(dataclasses.replace(spec, **words) for spec in self.specs)
            _ = self.layers  # raises if the budget has no room for the template
        if self.shard.mesh is not None:
            self.weights = place_all(self.shard, self.weights)
        if block:
            for layer in self.layers:
                check_reads_blocks(layer)
        self._shape = self.config, batch, prompt_len, self.max_new_tokens, self.weights.dtype
        self.compile_seconds = 0.0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.specs[0].batch * self.shard.data

    @property
    def block(self) -> int:
        """Tokens per block of chunked prefill; 0 if prompts are prefilled whole."""
        return self.specs[0].block

    @property
    def layers(self) -> tuple[CacheLayer[Any], ...]:
        """The policy's layers."""
        return _layers_of(self.policy, self.specs)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device, with the states of recurrent layers."""
        return _cache_bytes(self.policy, self.specs)[0]

    @property
    def full_cache_bytes(self) -> int:
        """Bytes that a full cache of these sizes would need on each device."""
        return _cache_bytes(
            Full().for_model(self.config), _specs_on(_whole(self.specs), get_shard(self.mesh, self.config))
        )[0]

    @property
    def repeated_cache_bytes(self) -> int:
        """Bytes of `cache_bytes` that are replicated on all devices that share slots."""
        return _repeated_bytes(self.policy, self.specs)

    @property
    def sharded_caches(self) -> int:
        """Number of caches with sharded slots: one per layer, or per group of heads. Each adds a collective to every step."""
        return sharded_caches(self.policy, self.specs)

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of the cache in host memory."""
        return _cache_bytes(self.policy, self.specs)[1]

    @property
    def step_bytes_read(self) -> int:
        """Bytes of the cache that one decode step reads."""
        return _step_bytes_read(self.policy, self.specs)

    def of(self, params: Params) -> "Engine":
        """Copy of the engine with other weights of the same shape and type. Nothing is compiled again.

        Raises:
            ValueError: the weights have another shape or type, or the policy replays words and the tokenizer differs.
        """
        weights = without_text(params)
        if self.shard.mesh is not None:
            weights = place_all(self.shard, weights)
        if params.config != self.config or not same_shapes(weights, self.weights):
            raise ValueError(
                f"these weights are a {params.config.family} model in {params.dtype.name}, the programs are for another shape or "
                f"type ({self.config.family}, {self.weights.dtype.name}); give the weights that they were compiled for"
            )
        spec = self.specs[0]
        if told(self.layers, params.tokenizer) != {"words": spec.words, "template": spec.template}:
            raise ValueError(
                f"{self.policy.info.name} prefills words of its own, and these programs were compiled for another tokenizer; "
                "compile with the weights"
            )
        other = object.__new__(Engine)
        other.__dict__.update(self.__dict__, weights=weights)
        other.__dict__.pop("_origin", None)  # it contains a sample of the weights
        return other

    def compile(self, sampler: Sampler | None = None) -> Memory:
        """Compile the prefill and decode programs, and report their memory.

        Args:
            sampler: how tokens will be sampled; None is greedy. Only which filters it has matters, not their values.

        Returns:
            The memory on each device.
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
        """The compiled prefill and decode programs.

        Args:
            state: shapes of the state from which decoding starts. The first program is then None.
            sampler: as for `compile`.
            given: padded number of given tokens. If it is set, the second program is that of `answering`.
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
        """The compiled prefill program, and shapes and shardings of the state that it returns.

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
        """State with empty caches.

        Args:
            total: as for `extend`.
            seeds: as for `prefill`.

        Raises:
            ValueError: a list does not have one whole number per sequence.
        """
        self._check_memory()
        return self._own(
            decoding.empty(self.policy, self.specs, *map(jnp.asarray, (self._seeds(seeds), self._total(total))))
        )

    def prefill(
        self,
        prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"],
        new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        sampler: Sampler | None = None,
        eos_ids: Sequence[int] = (),
        progress: Callable[[int, int], Any] | None = None,
    ) -> tuple[Decoding, Float[Array, " B"]]:
        """Prefill one prompt per sequence, whole or in blocks, and sample the first token.

        Args:
            prompts: token ids of each prompt.
            new_tokens: number of tokens that will follow each prompt, which fractional budgets count; None means
                `max_new_tokens`.
            seeds: sampling seed of each sequence; 0 by default.
            sampler: how tokens are sampled; None is greedy.
            eos_ids: token ids that end a sequence.
            progress: called after each block with the number of finished blocks and of all blocks.

        Returns:
            The state, and the first tokens' log-probabilities under the model, [B].

        Raises:
            ValueError: there is not one prompt per sequence, a prompt is empty, too long or has an invalid token id, or
                a list does not have one whole number per sequence.
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
        """Prefill one block of a longer text for each sequence, and sample the next token. The state is used up.

        See `decoding.extend`.

        Args:
            state: the state to continue from.
            tokens: up to `block` token ids per sequence; none to leave a sequence unchanged.
            total: final length of each sequence in tokens, to which fractional budgets refer; None means the maximum.
            sampler, eos_ids: as for `prefill`.

        Returns:
            The state, and the sampled tokens' log-probabilities, [B].

        Raises:
            ValueError: the engine has no `block`, the state is of another engine, there is not one block per sequence,
                or a block is too long or has an invalid token id.
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
        """Compile `extend` for these arguments, if necessary, and return the call. The call uses the state up."""
        self._check(state)
        if not self.block:
            raise ValueError("this engine prefills prompts whole; make the engine with block=, such as 512")
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
        """Sample up to `count` more tokens per sequence. The state is used up.

        See `decoding.decode`.

        Args:
            state: the state to continue from.
            count: number of tokens, at most what is left of `max_new_tokens`. Each one appends its predecessor to the
                cache.
            sampler, eos_ids: as for `prefill`.

        Returns:
            The state, tokens and log-probabilities. They have more columns than `count`, which is rounded up to a
                multiple of 256 (`decoding.CHUNK`). Only the first columns are filled: as many as `state.steps` grew by.

        Raises:
            ValueError: the state is of another engine, or `count` is too large.
            RuntimeError: the state has been used up.

        Example:
            >>> engine = kvjax.Engine(params, "snapkv:window=8", 16, prompt_len=48, max_new_tokens=8)
            >>> state, logprobs = engine.prefill([[5, 9, 2] * 16])
            >>> before = int(state.steps)
            >>> state, tokens, logprobs = engine.decode(state, 7)
            >>> tokens.shape, tokens[:, : int(state.steps) - before].shape
            ((1, 256), (1, 7))
        """
        self._check(state)
        left = whole("count", count, 0)
        self._check_room(state, left)
        how, parts = self.how(sampler, eos_ids), []
        while left > 0 or not parts:
            state, *part = self._going_on(
                decoding.decode, state, np.asarray(min(left, decoding.CHUNK), np.int32), *how
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
        """Compile, if necessary, the program that appends given tokens and samples, and return the call. The call uses the state up.

        See `decoding.answer`.

        Args:
            state: the state to continue from.
            given: token ids for each sequence. One without any goes on from its sampled token.
            count: number of tokens to sample after the longest given row, 1 to `decoding.CHUNK`. `decode` samples more.
            sampler, eos_ids: as for `prefill`.
            size: length that `given` is padded to; by default a bucket.

        Raises:
            ValueError: the state is of another engine, too many tokens are given or requested, there is not one row per
                sequence, or a row is too long or has an invalid token id.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        size = None if size is None else whole("size", size, 1)
        check_ids(
            given, self.batch, self.max_new_tokens if size is None else size, self.config.vocab_size, "given row", 0
        )
        count = whole("count", count, 1)
        if count > decoding.CHUNK:
            raise ValueError(f"count={count}; give {decoding.CHUNK} or fewer, and have `decode` sample the others")
        self._check_room(state, max(*map(len, given), 1) + count - 1)
        tokens = decoding.padded(given, size)
        return self._going_on(decoding.answer, state, *tokens, np.asarray(count, np.int32), *self.how(sampler, eos_ids))

    @any_rank
    def logits(
        self,
        params: Params,
        tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"],
        lengths: Int[Array, " B"] | Int[np.ndarray, " B"],
        following: Int[Array, "B M"] | Int[np.ndarray, "B M"],
    ) -> Float[Array, "B M V"]:
        """Logits of given tokens after prompts, through the policy's cache, as a function to differentiate.

        Call it inside `jax.jit` and `jax.grad`. Prefill compresses the prompts, and each following token is a decode step
        that is rematerialised in the backward pass. Gradients go through what the policy keeps, and not through the
        choice of it. Kernels give way to XLA under differentiation.

        Args:
            params: weights of this engine's model, which may be traced.
            tokens: prompts, right-padded to any length up to the engine's.
            lengths: number of tokens of each prompt.
            following: M tokens after each prompt, at most `max_new_tokens`. Fractional budgets are of prompt and following
                tokens together.

        Returns:
            Logits from which each following token would be sampled. The first are those after the prompt.

        Raises:
            ValueError: arrays have other sizes than the engine, or the engine is on a mesh or prefills in blocks.
            PolicyError: the policy has no gradient, when it is differentiated.
        """
        rows, most = self.batch, self.specs[0].prompt_len
        if self.shard.mesh is not None or self.block:
            raise ValueError(
                "logits for training run on one device and prefill whole prompts; make an engine without mesh and block"
            )
        tokens, lengths, following = jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(following)
        if tokens.ndim != 2 or len(tokens) != rows or not 0 < tokens.shape[1] <= most or lengths.shape != (rows,):
            raise ValueError(
                f"tokens {list(tokens.shape)} and lengths {list(lengths.shape)}; give {rows} prompts of up to {most} places each"
            )
        if following.ndim != 2 or len(following) != rows or not 0 < following.shape[1] <= self.max_new_tokens:
            raise ValueError(
                f"following {list(following.shape)}; give {rows} rows of 1 to {self.max_new_tokens} tokens"
            )
        padded = jnp.pad(tokens, ((0, 0), (0, most - tokens.shape[1])))
        return following_logits(self.policy, self.specs, without_text(params), padded, lengths, following)

    def score(
        self,
        params: Params,
        tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"],
        lengths: Int[Array, " B"] | Int[np.ndarray, " B"],
        following: Int[Array, "B M"] | Int[np.ndarray, "B M"],
    ) -> Float[Array, "B M"]:
        """Log-probability of each following token. Arguments and errors as for `logits`."""
        logprobs = jax.nn.log_softmax(self.logits(params, tokens, lengths, following))
        return jnp.take_along_axis(logprobs, jnp.asarray(following)[..., None], axis=-1)[..., 0]

    def reorder(self, state: Decoding, rows: Sequence[int]) -> Decoding:
        """Copy rows of a state, as beam search does: row i of the result is row `rows[i]`. The state itself remains usable.

        Args:
            state: the state.
            rows: one index per row. A row may be copied several times, or dropped.

        Raises:
            ValueError: the state is of another engine, there is not one index per row, an index is out of range, or the
                engine is on a mesh.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        order = wholes("rows", rows, self.batch, 0)
        if max(order) >= self.batch:
            raise ValueError(f"rows has {max(order)}, but the rows of this engine are 0 to {self.batch - 1}")
        if self.shard.mesh is not None:
            raise ValueError("rows are reordered on one device; make the engine without a mesh")
        return self._own(decoding.reordered(_without_origin(state), jnp.asarray(order, jnp.int32)))

    def save(self, state: Decoding) -> Decoding:
        """Copy a state to the host as unsharded NumPy arrays. `resume` restores it on this mesh or another.

        The state itself remains usable.

        Raises:
            ValueError: the state is of another engine.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        saved = decoding.saved(self.policy, self.specs, state)
        return dataclasses.replace(saved, origin=dataclasses.replace(self._origin, shard=None))

    def resume(self, state: Decoding) -> Decoding:
        """Put a saved state on this engine's devices.

        Raises:
            ValueError: the state has other sizes, or is of another policy or model.
            RuntimeError: the state has been used up.
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
        """Each cached layer's kept slots, all rows and heads, unsharded. On a mesh they are copied to the host first.

        Recurrent layers keep no tokens. `ModelConfig.cached` has the indices of the others.

        Raises:
            ValueError: the state is of another engine.
            RuntimeError: the state has been used up.
        """
        self._check(state)
        caches = state.caches if self.shard.mesh is None else jax.tree.map(jnp.asarray, self.save(state).caches)
        return kept_slots([self.policy.layer(spec.whole) for spec in self.specs], caches)

    def how(self, sampler: Sampler | None = None, eos_ids: Sequence[int] = ()) -> tuple[Sampler, Int[np.ndarray, " E"]]:
        """Sampling arguments of the programs. Arguments as for `prefill`.

        End tokens are padded with -1 to the number that the model has, and to at least one, so that ignoring them needs
        no other program. (In a loop over a mesh, an empty array crashes JAX 0.11.2.) The ids stay on the host, so that
        programs can be compiled for absent devices.
        """
        ids = wholes("eos_ids", eos_ids, None)
        ids += [-1] * (max(len(self.config.eos), 1) - len(ids))
        if sampler is not None and not callable(sampler):
            raise ValueError(
                f"sampler is {shown(sampler)}; give one of kvjax.runtime.sampling, or a function like them"
            )
        return Greedy() if sampler is None else sampler, np.asarray(ids, np.int32)

    def ready(self, program: Program, *args: Any) -> Callable[[], Any]:
        """Compile a program of `decoding` for this engine, if necessary, and return the call that runs it."""
        before = program.compile_seconds
        run = program.ready(self.policy, self.specs, self.weights, *map(_without_origin, args))
        self.compile_seconds += program.compile_seconds - before
        return run

    def _extending(
        self,
        state: Decoding,
        tokens: Sequence[Sequence[int]],
        total: Sequence[int] | None,
        sampler: Sampler | None,
        eos_ids: Sequence[int],
    ) -> Callable[[], tuple[Decoding, Float[Array, " B"]]]:
        """`extending` without its checks."""
        given = decoding.padded(tokens, self.block)
        return self._going_on(decoding.extend, state, *given, self._total(total), *self.how(sampler, eos_ids))

    def _going_on(self, program: Program, state: Decoding, *args: Any) -> Callable[[], Any]:
        """`ready` of a program that continues from a state. The returned state gets this engine's origin."""
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
        """Raise `ValueError` if cache and weights exceed the memory, before anything is compiled or allocated."""
        limit, spec = memory_limit(self.shard), self.specs[0]
        full = self.config.cache_bytes(spec.max_tokens + spec.block, spec.dtype.itemsize)
        if limit is None or 4 * spec.batch * full < limit:  # 4 allows for what a policy stores besides keys and values
            return
        held, weights = self.cache_bytes, bytes_per_device(self.weights)
        if held + weights > limit:
            raise ValueError(
                f"a cache of {decimal(held)} by {self.policy.info.name} and weights of {decimal(weights)} exceed the {decimal(limit)} of "
                "memory here; give fewer tokens or rows, a smaller budget, or another policy"
            )

    @functools.cached_property
    def _origin(self) -> Origin:
        """Identifies states of this engine."""
        return Origin(self.policy, _whole(self.specs), self.config, self.shard, sample_of(self.weights))

    def _own(self, state: Decoding) -> Decoding:
        return dataclasses.replace(state, origin=self._origin)

    def _check(self, state: Any) -> None:
        """Raise unless the state is of this engine or an equal one, and has not been used up."""
        decoding.check_state(state)
        if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.caches)):
            raise ValueError("this state is on the host, as `save` returns it; pass it to `resume` first")
        if state.origin is None:
            decoding.check_like(state, self._shapes)
        else:
            check_same_origin(state.origin, self._origin)

    @functools.cached_property
    def _shapes(self) -> Decoding:
        """Shapes of the arrays of a state."""
        rows = (jax.ShapeDtypeStruct((self.batch,), dtype) for dtype in (jnp.uint32, jnp.int32))
        return decoding.begin.shapes(self.policy, self.specs, *rows)

    def _check_room(self, state: Decoding, reads: int) -> None:
        """Raise `ValueError` unless the state has room for `reads` more tokens."""
        read = int(on_host(state.steps))
        if read + reads > self.max_new_tokens:
            raise ValueError(
                f"{reads} more tokens after the {read} that follow the prompt are more than max_new_tokens={self.max_new_tokens} of this "
                f"engine; give {max(self.max_new_tokens - read, 0)} or fewer, or make an engine for more"
            )

    def _seeds(self, seeds: Sequence[int] | None) -> Any:
        found = [0] * self.batch if seeds is None else wholes("seeds", seeds, self.batch)
        return np.asarray([seed % 2**32 for seed in found], np.uint32)

    def _total(self, total: Sequence[int] | None) -> Int[np.ndarray, " B"]:
        if total is not None:
            total = self._totals(wholes("total", total, self.batch, 0), "total")
        return np.asarray([self.specs[0].max_tokens] * self.batch if total is None else total, np.int32)

    def _totals(self, total: list[int], name: str) -> list[int]:
        """Validate the final lengths of the sequences against the cache."""
        room = self.specs[0].max_tokens
        if max(total) > room:
            raise ValueError(
                f"{name}: a row of {max(total)} tokens in all is longer than this engine has room for, {room}; give fewer, or make an engine for more"
            )
        return total


# What follows from a policy and specs is computed once for all engines. Values that are equal mean the same.


@functools.lru_cache(maxsize=256)
def _specs_on(specs: tuple[LayerSpec, ...], shard: Shard) -> tuple[LayerSpec, ...]:
    """Specs of each device's part of the layers."""
    return tuple(spec.on(shard) for spec in specs)


@functools.lru_cache(maxsize=256)
def _whole(specs: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Specs of the unsharded layers, without the size of prefill blocks."""
    return tuple(dataclasses.replace(spec.whole, block=0) for spec in specs)


@functools.lru_cache(maxsize=256)
def _layers_of(policy: Policy, specs: tuple[LayerSpec, ...]) -> tuple[CacheLayer[Any], ...]:
    return decoding.layers_of(policy, specs)


@functools.lru_cache(maxsize=256)
def _cache_bytes(policy: Policy, specs: tuple[LayerSpec, ...]) -> tuple[int, int]:
    """Bytes of the cache on each device, and in host memory."""
    held = [held_bytes(layer) for layer in _layers_of(policy, specs)]
    return sum(device for device, _ in held), sum(host for _, host in held)


@functools.lru_cache(maxsize=256)
def _step_bytes_read(policy: Policy, specs: tuple[LayerSpec, ...]) -> int:
    return sum(layer.bytes_read for layer in _layers_of(policy, specs))


_repeated_bytes = functools.lru_cache(maxsize=256)(repeated_bytes)


def _without_origin(value: Any) -> Any:
    """Remove a state's origin, as programs need. Other values are returned unchanged."""
    return dataclasses.replace(value, origin=None) if isinstance(value, Decoding) else value


def blocks(prompts: Sequence[Sequence[int]] | Int[np.ndarray, "B S"], size: int) -> Iterator[list[list[int]]]:
    """Split prompts into blocks of `size` tokens. All rows end with the last block, and a row's first block may be partial.

    Many policies select by the last tokens of a prompt, which are thus in one block.
    """
    for left in range(max(-(-len(prompt) // size) for prompt in prompts), 0, -1):
        yield [
            list(prompt[max(len(prompt) - left * size, 0) : max(len(prompt) - (left - 1) * size, 0)])
            for prompt in prompts
        ]


def program_bytes(executable: Any) -> int:
    """Peak device memory of a program in bytes: arguments, temporaries and results, with aliased memory counted once."""
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
