"""KVgrad against the literal algorithm, with gradients of transformers and torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from arrays import to_jax
from kernels.lowering import on
from policies import oracle_kvgrad as oracle
from policies import oracle_kvzip
from policies.driver import make_case, run
from policies.oracle_arrays import ROPE, rotate
from policies.slots import kept

import kvjax
from kvjax.analysis.recording import record
from kvjax.cache import PromptKV, TokenBlock
from kvjax.models import transformer
from kvjax.policies import KVgrad, KVzip, PolicyError
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.budget import budget_tokens
from kvjax.policies.kvzip import FIRST, THEN
from kvjax.policies.replay import Part, held_whole
from kvjax.runtime import replay

# Cases worked out by hand.


def observed(sensitivity) -> list[float]:
    """Scores of two tokens with logits ln 2 and ln 3 and values of norm 3 and 1, read by two queries with one sink of logit 0."""
    spec = dataclasses.replace(make_case(0, [3], 1).spec, batch=1, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    reading = KVgrad(chunk=2, sinks=1).replay
    still = np.zeros((1, 3, 1, 2), np.float32)
    keys, values = still.copy(), still.copy()
    keys[0, :, 0, 0], values[0, :, 0, 0] = [0, np.log(2), np.log(3)], [0, 3, 1]
    queries, new = np.zeros((1, 2, 1, 2), np.float32), np.zeros((1, 2, 1, 2), np.float32)
    queries[..., 0] = 1

    @jax.jit
    def scores(keys, values, queries, new, norms):
        count, lengths = (jnp.full(1, n, jnp.int32) for n in (2, 3))
        unturned = dataclasses.replace(spec, rope=type(ROPE)((0.0,)))
        prompt = PromptKV.of(unturned.rope, keys, keys, values, lengths, lengths)
        held = held_whole(unturned, prompt, 2)
        around = AttentionContext.alone(unturned)
        prepared = reading.prepare(unturned, held, around)
        block = TokenBlock(queries, new, new, lengths, count, lengths, unturned.rope)
        one, none = jnp.ones(1, jnp.int32), jnp.zeros((), jnp.int32)
        return reading.observe(unturned, Part(held, block, one, count, none, around, prepared, norms))

    norms = None if sensitivity is None else np.asarray([sensitivity], np.float32)
    return np.asarray(scores(keys, values, queries, new, norms))[0, 0].tolist()


def test_scores_by_hand():
    """Query 0 gives 2/7 and 3/7, query 1 2/8 and 3/8; times norms 3 and 1 of the values, and of the gradients."""
    assert observed([1.0, 1.0]) == pytest.approx([6 / 7, 3 / 7])
    assert observed([1.0, 4.0]) == pytest.approx([4 * 6 / 8, 4 * 3 / 8])
    assert observed(None) == pytest.approx([6 / 7, 3 / 7])


def test_words_have_no_space_at_the_end():
    """As in kvpress; the first words are KVzip's."""
    assert KVgrad().replay.then == THEN.rstrip() != THEN
    assert KVgrad().replay.first == FIRST


# Random cases of one layer, without a model: gradients count as 1.


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"budget": 14, "chunk": 9, "sinks": 2, "scope": "layer"}, 55),
        pytest.param({"budget": 14, "chunk": 9, "sinks": 2, "scope": "layer"}, 200, marks=pytest.mark.long),
        pytest.param({"budget": 11, "chunk": 20, "sinks": 3, "scope": "head"}, 200, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_equals_the_literal_algorithm(options, rows):
    """A ragged batch, prompts shorter and longer than the budget and than a part."""
    policy, heads, kv_heads = KVgrad(**options), 4, 2
    lengths = np.random.default_rng(7).integers(1, 64, size=rows)
    case = make_case(5, lengths, 1, heads, kv_heads)
    held = kept(policy, case, run(policy, case, padding=np.nan)[2][0])
    for row, length in enumerate(lengths.tolist()):
        found = np.zeros((1, kv_heads, length))
        for part in oracle_kvzip.parts(length, policy.chunk, 0):
            again = length + np.arange(len(part))
            for head in range(kv_heads):
                turned = rotate(ROPE, case.k[row, :length, head], np.arange(length))
                own = rotate(ROPE, case.k[row, list(part), head], again)
                queries = rotate(ROPE, case.q[row, list(part), head * 2 : head * 2 + 2], again[:, None])
                values = np.stack([np.linalg.norm(case.v[row, list(part), head], axis=-1)] * 2)
                sinks = turned[: min(policy.sinks, part.start)]
                found[0, head, list(part)] = oracle.scores(
                    queries, sinks, turned[list(part)], own, values, np.ones(len(part))
                )
        budget = budget_tokens(policy.budget, length + 1)
        expected = oracle_kvzip.survivors(found, budget, scope=policy.scope, sinks=policy.sinks)[0]
        assert held[row] == [set(head) for head in expected]


# A model.


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen3-yarn-biased", "qwen2-moe"])
def test_gradients_are_torchs(name):
    """At each token that is read after prompts of several lengths, in every layer."""
    pytest.importorskip("torch")
    model = oracles.transformers_model(name)
    params = oracles.converted(model)
    random, lengths, counts = np.random.default_rng(2), [30, 12], [9, 7]
    prompts = [random.integers(0, 101, n).tolist() for n in lengths]
    reads = [random.integers(0, 101, n).tolist() for n in counts]
    got = np.asarray(gradients(params, prompts, reads))
    for row, count in enumerate(counts):
        want = oracle.gradient_norms(model, prompts[row], reads[row])
        np.testing.assert_allclose(got[:, row, :count], want, rtol=2e-3, atol=1e-5 * want.max())
        assert not got[:, row, count:].any()


def gradients(params, prompts, reads):
    """`transformer.attention_gradients` of rows read after their prompts."""
    size, width = max(map(len, prompts)), max(map(len, reads))
    tokens, block = (np.zeros((len(prompts), n), np.int32) for n in (size, width))
    for row, (prompt, read) in enumerate(zip(prompts, reads, strict=True)):
        tokens[row, : len(prompt)], block[row, : len(read)] = prompt, read
    lengths, counts = (to_jax([len(x) for x in rows], jnp.int32) for rows in (prompts, reads))
    engine = kvjax.Engine(params, KVgrad(budget=8), batch=len(prompts), prompt_len=size, max_new_tokens=4)

    @jax.jit
    def work(params, tokens, block):
        firsts = [replay._First.of(layer, width) for layer in engine.layers]
        held = [x.held for x in transformer.prefill(params, tokens, lengths, lengths + 4, firsts)[1]]
        readers = [replay._Reading(layer.policy, layer.spec, inner=layer) for layer in engine.layers]
        return transformer.attention_gradients(params, held, block, lengths, counts, lengths + 4, readers)

    return work(engine.weights, tokens, block)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_model_reads_again(scope):
    """What is kept, with gradients by torch: ragged rows, parts of 11 tokens with the last 3 of the part before, no words."""
    pytest.importorskip("torch")
    model = oracles.transformers_model("smollm2")
    params = oracles.converted(model)
    policy, config = KVgrad(budget=12, chunk=11, overlap=3, sinks=2, scope=scope), params.config
    random, group = np.random.default_rng(3), config.num_heads // config.num_kv_heads
    prompts = [random.integers(0, 101, size=n).tolist() for n in (50, 11, 23, 5)]
    engine = kvjax.Engine(params, policy, batch=4, prompt_len=50, max_new_tokens=4)
    state, _ = engine.prefill(prompts, [4] * 4)
    caches = [jax.device_get(jax.jit(layer.view)(x)) for layer, x in zip(engine.layers, state.caches, strict=True)]
    for row, prompt in enumerate(prompts):
        scores = np.zeros((config.num_layers, config.num_kv_heads, len(prompt)))
        for number, part in enumerate(oracle_kvzip.parts(len(prompt), policy.chunk, 0)):
            before = prompt[part.start - policy.overlap : part.start] if number else []
            reading = [*before, *(prompt[i] for i in part)]
            norms = oracle.gradient_norms(model, prompt, reading)
            read = slice(len(prompt), len(prompt) + len(reading))
            for layer, found in enumerate(record(params, [*prompt, *reading])):
                matrix = np.asarray(params.layers[layer].attn.o, np.float64).T
                matrix = matrix.reshape(config.num_heads, config.head_dim, -1)
                for head in range(config.num_kv_heads):
                    mine = slice(head * group, (head + 1) * group)
                    values = np.linalg.norm(found.v[list(part), head] @ matrix[mine], axis=-1)
                    scores[layer, head, list(part)] = oracle.scores(
                        found.q[read, mine],
                        found.k[: min(policy.sinks, part.start), head],
                        found.k[list(part), head],
                        found.k[read, head],
                        values,
                        norms[layer],
                    )
        expected = oracle_kvzip.survivors(scores, policy.budget, scope=scope, sinks=policy.sinks, slack=policy.slack)
        for slots, heads in zip(caches, expected, strict=True):
            held = zip(slots.pos[row], slots.weight[row] > 0, strict=True)
            assert [sorted(p[there].tolist()) for p, there in held] == heads


def test_differentiated_programs_have_no_kernels():
    """On a GPU, too, where the same attention has one."""
    q, k, weight = jnp.ones((1, 2, 64)), jnp.ones((1, 1, 64, 64)), jnp.ones((1, 1, 64))

    def attend(q):
        return jnp.sum(kvjax.pallas_kernels.decode_attention(q, k, k, weight, scale=1.0).out)

    def program(function):
        with on():
            return jax.jit(function).trace(q).lower(lowering_platforms=("cuda",)).as_text()

    assert "decode_attention" in program(attend)
    assert 'name = "decode_attention"' not in program(jax.grad(attend))


def test_what_does_not_go():
    with pytest.raises(PolicyError, match="kvgrad: chunk=0 is too small"):
        KVgrad(chunk=0)
    with pytest.raises(TypeError, match="plus"):
        KVgrad(plus=True)  # pyright: ignore[reportCallIssue]
    assert {field.name for field in dataclasses.fields(KVzip)} - {f.name for f in dataclasses.fields(KVgrad)} == {
        "plus"
    }
