"""The decode loop does what single steps do, also where layers compress only now and then."""

import dataclasses
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int, UInt32
from policies.driver import TINY
from policies.surrogates import model_inputs

from kvjax import cache
from kvjax.cache import Shard
from kvjax.conversion.state_dict import quantize_weights
from kvjax.models import transformer
from kvjax.pallas_kernels.device import Target
from kvjax.policies import TOVA, Chelsea, ClusterKV, Full, StreamingLLM, TriAttention, by_head, by_layer
from kvjax.runtime import compression, decoding, program
from kvjax.runtime import rows as serving
from kvjax.runtime.program import CONCURRENT_GRAPH_OPTIONS, CUDA_GRAPH_OPTIONS, MATMUL_OPTIONS, MESH_GRAPH_OPTIONS
from kvjax.runtime.sampling import Greedy

STEPS = 24
CHELSEA = Chelsea(budget=12, sinks=2, recent=3, every=5, chunk=8, outliers=False)
CLUSTERKV = ClusterKV(budget=8, sinks=2, dense_layers=0, window=7, n_clusters=2, new_clusters=2, iterations=2)
MIXED = by_head({"a": CHELSEA, "b": StreamingLLM(budget=8)}, [["a", "b"], ["b", "a"]])
CASES = [
    pytest.param(CHELSEA, id="chelsea", marks=pytest.mark.slow),
    pytest.param(CLUSTERKV, id="clusterkv"),
    pytest.param(
        by_head({"a": CHELSEA, "b": Full()}, [["a", "b"], ["b", "b"]]), id="beside full heads", marks=pytest.mark.slow
    ),
    pytest.param(MIXED, id="beside ever busy heads", marks=pytest.mark.slow),
    pytest.param(by_layer([CLUSTERKV, CHELSEA]), id="by layer", marks=pytest.mark.slow),
    pytest.param(
        TriAttention(budget=8, every=4, window=2, sets="union", **model_inputs(TriAttention, TINY)),
        id="layers together",
        marks=pytest.mark.slow,
    ),
]


def begun(tiny, policy):
    """Two ragged prompts, read; what the programs are called with."""
    policy = policy.bind(tiny.config)
    specs = cache.layer_specs(tiny.config, 2, 14, STEPS, jnp.float32)
    tokens, lengths = decoding.padded([list(range(14)), [3, 1, 4, 1, 5]])
    ends = jnp.zeros((0,), jnp.int32)
    state, _ = decoding.prefill(
        policy, specs, tiny, tokens, lengths, lengths + STEPS, jnp.zeros(2, jnp.uint32), Greedy(), ends
    )
    return policy, specs, state, ends


@pytest.mark.rotating
@pytest.mark.parametrize("policy", CASES)
def test_the_loop_is_single_steps(tiny, policy):
    policy, specs, state, ends = begun(tiny, policy)
    step = jax.jit(partial(decoding.step, policy, specs))
    caches, token, pos, sampled = state.caches, state.token, state.pos, []
    for _ in range(STEPS):
        logits, caches = step(tiny, caches, token, pos)
        token, pos = jnp.argmax(logits, axis=-1).astype(jnp.int32), pos + 1
        sampled.append(token)
    count = jnp.asarray(STEPS, jnp.int32)
    after, tokens, _ = decoding.decode(policy, specs, tiny, state, count, Greedy(), ends)
    np.testing.assert_array_equal(tokens[:, :STEPS], np.stack(sampled, axis=1))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), after.caches, caches)


@pytest.mark.parametrize(("policy", "times"), [(CHELSEA, (5, 3)), (CLUSTERKV, (3, 3))], ids=["chelsea", "clusterkv"])
def test_rows_are_due_as_often_as_they_have_waited(tiny, policy, times):
    policy, specs, state, _ = begun(tiny, policy)

    @jax.jit
    def advance(caches, token, pos):
        """The caches after a step, and which rows needed compression before and after it."""
        layers = decoding.layers_of(policy, specs)
        _, caches = transformer.decode_step(tiny, caches, token, pos, layers)
        after = [layer.compress(x) for layer, x in zip(layers, caches, strict=True)]
        return after, *(layers[0].is_due(x[0]) for x in (caches, after))

    caches, counts = state.caches, np.zeros(2, int)
    for i in range(STEPS):
        caches, before, after = advance(caches, state.token, state.pos + i)
        counts += np.asarray(before)
        assert not np.any(after)
    assert tuple(counts) == times


def test_who_never_compresses_and_who_always(tiny):
    spec = cache.layer_specs(tiny.config, 1, 8, 8, jnp.float32)[0]
    told = {
        name: policy.bind(tiny.config).layer(spec).when
        for name, policy in [("full", Full()), ("stream", StreamingLLM(budget=8)), ("mixed", MIXED)]
    }
    assert told == {"full": "never", "stream": "every_step", "mixed": "every_step"}
    short = ClusterKV(budget=4, sinks=2, dense_layers=0, window=20).bind(tiny.config)  # no tail will ever be as long
    assert short.layer(spec).attention == "sparse"
    assert short.layer(spec).when == "never"


@pytest.mark.parametrize("policy", [Full(), CLUSTERKV, CHELSEA])
def test_kernels_run_side_by_side_unless_told_not_to(tiny, policy, monkeypatch):
    specs = cache.layer_specs(tiny.config, 2, 14, STEPS, jnp.float32)
    assert decoding.decode._options((policy, specs, tiny)) == {}  # these are for GPUs alone
    monkeypatch.setattr(program, "target", lambda: Target("gpu", "NVIDIA H200"))
    assert decoding.decode._options((policy, specs, tiny)) == CUDA_GRAPH_OPTIONS | CONCURRENT_GRAPH_OPTIONS
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert decoding.decode._options((policy, specs, tiny)) == CONCURRENT_GRAPH_OPTIONS


def test_cublas_multiplies_many_rows_by_float_weights(tiny, monkeypatch):
    monkeypatch.setattr(program, "target", lambda: Target("gpu", "NVIDIA H200"))
    policy, quantized = Full(), quantize_weights(tiny, "int8")

    def options(made, rows, params):
        return made._options((policy, cache.layer_specs(tiny.config, rows, 14, STEPS, jnp.float32), params))

    graph = CUDA_GRAPH_OPTIONS | CONCURRENT_GRAPH_OPTIONS
    for rows, params, wanted in ((16, tiny, {}), (17, tiny, MATMUL_OPTIONS), (17, quantized, {})):
        for loop in (decoding.decode, decoding.answer, serving.serve):
            assert options(loop, rows, params) == graph | wanted
    for reading in (decoding.prefill, decoding.extend, serving.read, serving.read_block):
        assert options(reading, 1, tiny) == MATMUL_OPTIONS
        assert options(reading, 1, quantized) == {}
    for params, wanted in ((tiny, CUDA_GRAPH_OPTIONS | MATMUL_OPTIONS), (quantized, CUDA_GRAPH_OPTIONS)):
        assert options(serving.admit, 17, params) == wanted


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(("policy", "waits"), [(Full(), False), (CLUSTERKV, True), (CHELSEA, True)])
def test_layers_that_are_full_compress_one_after_the_other(tiny, policy, waits, platform, monkeypatch):
    """On GPUs each waits for the one before, whose room it takes over."""
    monkeypatch.setattr(compression, "target", lambda: Target(platform, platform))
    specs = cache.layer_specs(tiny.config, 2, 14, STEPS, jnp.float32)
    state = decoding.empty(policy, specs, jnp.zeros(2, jnp.uint32))
    ends = jnp.asarray([-1], jnp.int32)
    step = jax.jit(lambda *given: decoding._decode(*given), static_argnums=(0, 1, 5))  # traced anew for each platform
    text = step.lower(policy, specs, tiny, state, jnp.int32(1), Greedy(), ends).as_text()
    assert text.count("optimization_barrier") == (len(specs) - 1 if waits and platform == "gpu" else 0)


@pytest.fixture
def untold(monkeypatch):
    """No option of XLA's has been said to be refused."""
    monkeypatch.setattr(program, "_told", set())


@pytest.mark.parametrize(
    "options", [MESH_GRAPH_OPTIONS, CUDA_GRAPH_OPTIONS, CONCURRENT_GRAPH_OPTIONS, MATMUL_OPTIONS], ids=str
)
def test_options_are_known_with_their_values_or_not_at_all(options, untold, caplog):
    """XLA checks names and values before it looks for a GPU; what another version does not know is left out, and said."""
    program.compile_with(jax.jit(lambda x: x + 1).lower(jnp.zeros(3)), options)
    assert "not a valid" not in caplog.text


def test_an_option_that_is_refused_is_left_out_and_said_once(untold, caplog):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    options = {"xla_gpu_command_buffer_scheduling_mode": "SIDEWAYS", "xla_gpu_that_never_was": "1"} | CUDA_GRAPH_OPTIONS
    for _ in range(2):
        np.testing.assert_array_equal(program.compile_with(lowered, options)(jnp.zeros(3)), np.ones(3))
        assert caplog.text.count("SIDEWAYS") == 1
        assert caplog.text.count("compiled without ['xla_gpu_that_never_was']") == 1
    program.compile_with(lowered, {"xla_gpu_command_buffer_scheduling_mode": "UPWARDS"})
    assert "UPWARDS" in caplog.text


def test_an_option_stays_whose_name_is_a_part_of_one_that_is_refused(untold, caplog):
    class Lowered:
        def compile(self, compiler_options):
            if "xla_gpu_graph_level" in compiler_options:
                raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_gpu_graph_level'")
            return compiler_options

    options = {"xla_gpu_graph": "1", "graph_level": "1", "xla_gpu_graph_level": "1"}
    assert program.compile_with(Lowered(), options) == {"xla_gpu_graph": "1", "graph_level": "1"}
    assert "compiled without ['xla_gpu_graph_level']" in caplog.text


@pytest.mark.parametrize(
    ("rows", "policy", "wanted"),
    [
        (1, Full(), MESH_GRAPH_OPTIONS | CONCURRENT_GRAPH_OPTIONS),
        (1, TOVA(budget=8), MESH_GRAPH_OPTIONS),
        (1, CHELSEA, MESH_GRAPH_OPTIONS),
        (2, Full(), CUDA_GRAPH_OPTIONS | CONCURRENT_GRAPH_OPTIONS),
        (None, Full(), CUDA_GRAPH_OPTIONS | CONCURRENT_GRAPH_OPTIONS),
    ],
)
def test_sums_over_devices_are_part_of_the_graph_where_they_follow_one_another(tiny, rows, policy, wanted, monkeypatch):
    """Not where devices share rows, nor where they are of several processes, whose sums the host has a part in."""
    (spec, *_) = cache.layer_specs(tiny.config, 2, 14, STEPS, jnp.float32)
    monkeypatch.setattr(program, "target", lambda: Target("gpu", "NVIDIA H200"))
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    axes = ("data", "heads", "copies", "slots")
    mesh = AbstractMesh((1, 1, 1, 1), axes)
    if rows is not None:
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), axes)
        monkeypatch.setattr(Shard, "data", rows)
    shard = dataclasses.replace(spec.shard, mesh=mesh)
    monkeypatch.setattr(decoding, "layers_of", lambda policy, specs: (policy.layer(spec),))
    over = dataclasses.replace(spec, shard=shard)
    assert decoding.decode._options((policy, (over,), tiny)) == wanted
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "1")
    # What compresses when it is full does not run side by side over devices.
    side_by_side = {} if policy == CHELSEA else CONCURRENT_GRAPH_OPTIONS
    assert decoding.decode._options((policy, (over,), tiny)) == CUDA_GRAPH_OPTIONS | side_by_side


END = 63


@flax.struct.dataclass
class Scripted:
    """Samples what it is told: for the token at a position, of the row that has this seed."""

    tokens: Int[Array, "B T"]

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return self.tokens[seed.astype(jnp.int32), pos]


def scripted(tiny, ends):
    """What programs are called with: rows of 14 and 5 tokens, read, that sample 7 but for an end at the given positions."""
    specs = cache.layer_specs(tiny.config, 2, 14, STEPS, jnp.float32)
    tokens = np.full((2, 14 + STEPS + 1), 7, np.int32)
    for row, positions in enumerate(ends):
        tokens[row, list(positions)] = END
    sampler = Scripted(jnp.asarray(tokens))
    prompts, lengths = decoding.padded([list(range(14)), [3, 1, 4, 1, 5]])
    seeds = jnp.arange(2, dtype=jnp.uint32)
    end = jnp.asarray([END], jnp.int32)
    state, _ = decoding.prefill(Full(), specs, tiny, prompts, lengths, lengths + STEPS, seeds, sampler, end)
    return specs, state, sampler, end


@pytest.mark.parametrize("pieces", [(STEPS,), (3, STEPS), (1,) * STEPS], ids=["at once", "in two", "one by one"])
@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        (([16], [10]), 5),
        (([19], [7]), 5),
        (([14], [10]), 5),  # the first by what the prompt alone is followed by
        (([14], [5]), 0),
        (([16, 20], [7, 11]), 2),
        (([16], []), STEPS),
    ],
)
def test_the_loop_ends_with_the_last_row_to_end(tiny, ends, steps, pieces):
    """A row that has ended stays so, though it goes on to sample other tokens."""
    specs, state, sampler, end = scripted(tiny, ends)
    for piece in pieces:
        count = jnp.asarray(min(piece, STEPS - int(state.steps)), jnp.int32)
        state, _, _ = decoding.decode(Full(), specs, tiny, state, count, sampler, end)
    assert int(state.steps) == steps
    assert state.done.tolist() == [bool(positions) for positions in ends]


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        (([16], [10]), 5),
        (([19], [8]), 5),
        (([15, 19], [6, 7, 10]), 5),  # what rows would sample while they still read is no end
        (([], [8]), 8),
    ],
)
def test_an_answer_ends_with_the_last_row_to_end(tiny, ends, steps):
    """Rows read one token and three, and sample up to six from then on."""
    specs, state, sampler, end = scripted(tiny, ends)
    given, lengths = decoding.padded([[2], [2, 3, 4]])
    state, tokens, _ = decoding.answer(
        Full(), specs, tiny, state, given, lengths, jnp.asarray(6, jnp.int32), sampler, end
    )
    assert int(state.steps) == steps
    assert state.done.tolist() == [bool(positions) for positions in ends]
    for row, first in enumerate((15, 8)):
        sampled = steps - int(lengths[row]) + 1
        np.testing.assert_array_equal(tokens[row, :sampled], sampler.tokens[row, first : first + sampled])
