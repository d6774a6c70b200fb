"""KVzip against the literal algorithm: of one layer, and of a model that reads its prompt again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_kvzip as oracle
from policies.driver import TINY, make_case, run
from policies.oracle_arrays import ROPE, rotate
from policies.slots import kept

import kvjax
from kvjax.analysis.recording import record
from kvjax.cache import PromptKV, TokenBlock, layer_specs
from kvjax.config import PRESETS, Rope
from kvjax.models import transformer
from kvjax.policies import Full, KVzip, PolicyError, SnapKV, by_head, by_layer, get_policy, quantized
from kvjax.policies.attention_context import AttentionContext, projected_norms
from kvjax.policies.budget import budget_tokens
from kvjax.policies.kvzip import FIRST, THEN, Repetition
from kvjax.policies.replay import Part, held_whole
from kvjax.runtime import replay

# Cases worked out by hand.

STILL = Rope((0.0,))
"""A rotation by no angle."""


def observed(queries, sinks, part, own, values=None, inputs=None, **options) -> list[float]:
    """What `Repetition` finds of one part, of queries [R, G] and keys that are numbers.

    With `values` of the part's tokens and lengths of the `inputs` that ask, by KVzip+; the output projection changes nothing.
    """
    options |= {"needs_context": values is not None}
    reading = Repetition(chunk=len(part), sinks=len(sinks), **options)
    queries, keys = np.asarray(queries, np.float32), np.asarray([*sinks, *part], np.float32)

    def heads(x: np.ndarray) -> np.ndarray:
        return np.pad(x.astype(np.float32)[None, ..., None], [(0, 0)] * x.ndim + [(0, 0), (0, 1)])

    spec = dataclasses.replace(make_case(0, [len(keys)], 1).spec, batch=1, num_heads=queries.shape[1], num_kv_heads=1)
    spec = dataclasses.replace(spec, head_dim=2, rope=STILL, scale=1.0)
    held = keys if values is None else np.asarray([*[0] * len(sinks), *values], np.float32)
    lengths = np.asarray([1.0] * len(own) if inputs is None else inputs, np.float32)
    arrays = heads(keys[:, None]), heads(held[:, None]), heads(queries), heads(np.asarray(own)[:, None]), lengths
    numbers = [np.asarray(x, np.int32) for x in ([len(keys)], [len(own)], [len(sinks)], [len(part)], 1)]
    found = observation(reading, spec, values is None, *arrays, *numbers)
    return np.asarray(found)[0, 0, : len(part)].tolist()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def observation(reading, spec, alone, keys, held, queries, new, lengths, one, count, *at):
    whole = PromptKV.of(STILL, keys, keys, held, one, one)
    eye = jnp.broadcast_to(jnp.eye(2), (spec.num_heads, 2, 2))
    around = AttentionContext(lambda: lengths[None, :, None], lambda: eye)
    block = TokenBlock(queries, new, new, one, count, one, STILL)
    slots = held_whole(spec, whole, new.shape[1])
    prepared = reading.prepare(spec, slots, None if alone else around)
    return reading.observe(spec, Part(slots, block, *at, around, prepared))


def test_the_most_that_a_query_gives_by_hand():
    """A sink of logit 0, a part of ln 2 and ln 3, and two tokens of logit 0 that are read now; then a second head, of twice the query."""
    part = np.log([2, 3])
    assert observed([[1], [1]], [0], part, [0, 0]) == pytest.approx([2 / 7, 3 / 7])
    assert observed([[1, 2], [1, 2]], [0], part, [0, 0]) == pytest.approx([2 / 7, 9 / 15])
    keys = np.asarray([[0, 0], [0, 0]])
    got = oracle.part_scores(
        np.sqrt(2) * np.asarray([[[1, 0], [2, 0]]] * 2), keys[:1], np.stack([part, 0 * part], axis=1), keys
    )
    np.testing.assert_allclose(got, [2 / 7, 9 / 15])


def test_what_a_value_becomes_counts_by_hand():
    """The first head alone: inputs of length 2 and 1 ask, and values are 3 and 1 long; which turns the order around."""
    part, keys = np.log([2, 3]), np.zeros((2, 2))
    assert observed([[1], [1]], [0], part, [0, 0], values=[3, 1], inputs=[2, 1]) == pytest.approx([0.75, 0.375])
    queries = np.sqrt(2) * np.asarray([[[1, 0]]] * 2)
    got = oracle.part_scores(
        queries,
        keys[:1],
        np.stack([part, 0 * part], axis=1),
        keys,
        values=np.asarray([[3, 1]]),
        inputs=np.asarray([2, 1]),
    )
    np.testing.assert_allclose(got, [0.75, 0.375])


def test_how_long_values_become():
    """By the Gram matrix as by the projection itself, of all heads and of some."""
    random, spec = np.random.default_rng(0), make_case(0, [1], 1).spec
    matrix, values = random.normal(size=(4, 8, 40)).astype(np.float32), random.normal(size=(3, 2, 5, 8))
    around = AttentionContext(lambda: jnp.zeros(()), lambda: jnp.asarray(matrix))
    want = np.linalg.norm(np.einsum("bkth,kghd->bkgtd", values, matrix.reshape(2, 2, 8, 40)), axis=-1)
    values = values.astype(np.float32)
    norms = jax.jit(lambda spec, values: projected_norms(spec, around, values), static_argnums=0)
    np.testing.assert_allclose(norms(spec, values), want, rtol=1e-5)
    some = dataclasses.replace(spec, num_heads=2, num_kv_heads=1, kv_heads=(1,))
    np.testing.assert_allclose(norms(some, values[:, 1:]), want[:, 1:], rtol=1e-5)


def test_only_the_part_may_ask():
    """The second query alone, as the first is of the words."""
    assert observed([[1], [1]], [0], np.log([2, 3]), [0, 0], part_only=True) == pytest.approx([2 / 8, 3 / 8])


def test_a_part_is_compared_with_itself_alone():
    """Tokens in two parts score twice as much as in one that holds them all, but for what is read now."""
    logits = np.log([1, 4, 1, 4]) + 20  # the query's own key is as nothing
    assert observed([[1]], [], logits, [0]) == pytest.approx([0.1, 0.4, 0.1, 0.4], abs=1e-6)
    assert observed([[1]], [], logits[:2], [0]) == pytest.approx([0.2, 0.8], abs=1e-6)


UNEVEN = [[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]]


@pytest.mark.parametrize(("scope", "counts"), [("layer", [4, 0]), ("head", [2, 2])])
def test_heads_share_a_budget_by_hand(scope, counts):
    policy, scores = KVzip(budget=2, sinks=0, scope=scope), np.asarray([UNEVEN], np.float32)
    budget, pos = np.asarray([2], np.int32), np.broadcast_to(np.arange(4, dtype=np.int32), (1, 2, 4))
    if scope == "head":
        keep = jax.jit(policy.keep_mask)(scores, np.asarray([4], np.int32), budget, pos)
    else:
        keep = shared_mask(policy, scores[:, None], budget, pos, 4)[:, 0]
    keep = np.asarray(keep)
    assert keep.sum(axis=-1).tolist() == [counts]
    assert [len(head) for head in oracle.survivors(np.asarray([UNEVEN]), 2, scope=scope, sinks=0)[0]] == counts


def shared_mask(policy, scores, budget, pos, most):
    return np.asarray(shared_mask_of(policy, scores, budget, pos, most))


@functools.partial(jax.jit, static_argnums=(0, 4))
def shared_mask_of(policy, scores, budget, pos, most):
    return policy.shared_mask(scores, budget, pos, most)


def test_all_that_a_budget_gives_is_kept():
    """Where the published code keeps what exceeds its threshold: 299 of 1000 at 30 %, and nothing of three equal best ones at half."""
    pos = np.arange(6, dtype=np.int32)[None, None]
    equal = np.asarray([[[[1, 1, 1, 0.5, 0.2, 0.1]]]], np.float32)
    keep = shared_mask(KVzip(budget=3, sinks=0), equal, np.asarray([3], np.int32), pos, 6)
    assert keep[0, 0, 0].tolist() == [True] * 3 + [False] * 3
    many, pos = np.random.default_rng(0).random((1, 1, 1, 1000)), np.arange(1000, dtype=np.int32)[None, None]
    keep = shared_mask(KVzip(budget=300, sinks=0), many.astype(np.float32), np.asarray([300], np.int32), pos, 1000)
    assert int(keep.sum()) == 300


@pytest.mark.parametrize("slack", [1.0, 1.3, 2.0])
def test_a_layer_has_no_more_than_its_slots(slack):
    """One budget for all layers, of which one wants nearly everything: what it cannot have goes to the next best elsewhere."""
    random = np.random.default_rng(1)
    scores = random.random((3, 2, 40)) * np.asarray([1, 10, 0.1])[:, None, None]
    policy = KVzip(budget=10, sinks=2, scope="model", slack=slack)
    pos = np.broadcast_to(np.arange(40, dtype=np.int32), (1, 2, 40))
    keep = shared_mask(policy, scores[None].astype(np.float32), np.asarray([10], np.int32), pos, 20)
    counts = keep[0].sum(axis=(1, 2))
    assert counts.sum() == 60
    assert counts.max() == 2 * int(10 * slack)
    expected = oracle.survivors(scores, 10, scope="model", sinks=2, slack=slack)
    assert [[np.flatnonzero(head).tolist() for head in layer] for layer in keep[0]] == expected


# Random cases of one layer, which reads again what it had, without words.

CONFIGURATIONS = {
    "gqa, a layer's heads share": ({"budget": 14, "chunk": 9, "sinks": 2}, 4, 2),
    "every head as much": ({"budget": 12, "chunk": 64, "sinks": 3, "scope": "head"}, 4, 2),
    "mqa, a prefix": ({"budget": 15, "chunk": 7, "sinks": 1, "prefix": 5}, 4, 1),
    "gqa, lengths of values": ({"budget": 14, "chunk": 12, "sinks": 2, "plus": True}, 4, 2),
    "mha, a fraction, no sinks": ({"budget": 0.4, "chunk": 16, "sinks": 0}, 3, 3),
}
STEPS = 3
FAST = "gqa, a layer's heads share"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget and than a part: kept tokens, and those that come after them."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = KVzip(**options)
    least = 1 if isinstance(policy.budget, int) else 4
    lengths = np.random.default_rng(len(name)).integers(least, 64, size=55)
    case = make_case(5, lengths, STEPS, heads, kv_heads)
    held = [kept(policy, case, state) for state in run(policy, case, padding=np.nan)[2]]
    group, told = heads // kv_heads, {k: v for k, v in options.items() if k in ("sinks", "prefix", "scope")}
    for row, length in enumerate(lengths.tolist()):
        scores = np.zeros((1, kv_heads, length))
        for part in oracle.parts(length, policy.chunk, policy.prefix or 0):
            again = length + np.arange(len(part))  # where they stand now
            for head in range(kv_heads):
                turned = rotate(ROPE, case.k[row, :length, head], np.arange(length))
                own = rotate(ROPE, case.k[row, list(part), head], again)
                queries = rotate(ROPE, case.q[row, list(part), head * group : (head + 1) * group], again[:, None])
                sinks = turned[: min(policy.sinks, part.start)]
                lengths_of = {}
                if policy.plus:  # without a model values count as they are, and inputs are of length 1
                    values = np.linalg.norm(case.v[row, list(part), head], axis=-1)
                    lengths_of = {"values": np.stack([values] * group), "inputs": np.ones(len(part))}
                scores[0, head, list(part)] = oracle.part_scores(queries, sinks, turned[list(part)], own, **lengths_of)
        expected = oracle.survivors(scores, budget_tokens(policy.budget, length + STEPS), **told)[0]
        for i, heads_kept in enumerate(held):
            assert heads_kept[row] == [{*head, *range(length, length + i)} for head in expected]


# A model that reads its prompt again.


def literal(params, prompt: list[int], policy: KVzip, words, budget: int, prefix: int) -> list[list[list[int]]]:
    """What each layer's heads keep: each part is read behind prompt and words in one text, from the beginning."""
    config = params.config
    first, then, opening = words
    scores = np.zeros((config.num_layers, config.num_kv_heads, len(prompt)))
    for number, part in enumerate(oracle.parts(len(prompt), policy.chunk, prefix)):
        before = prompt[part.start - policy.overlap : part.start] if number else []
        asks = [*(then if number else first), *before, *opening]
        text = [*prompt, *asks, *(prompt[i] for i in part)]
        read = slice(len(prompt), len(text))
        asking = range(len(asks), len(asks) + len(part)) if policy.queries == "repeat" else None
        group = config.num_heads // config.num_kv_heads
        for layer, (q, k, v) in enumerate((x.q, x.k, x.v) for x in record(params, text)):
            inputs, output = around(params, layer, text) if policy.plus else (None, None)
            for head in range(config.num_kv_heads):
                own, sinks = q[read, head * group : (head + 1) * group], k[: min(policy.sinks, part.start), head]
                scores[layer, head, list(part)] = oracle.part_scores(
                    own,
                    sinks,
                    k[list(part), head],
                    k[read, head],
                    asking,
                    None
                    if output is None
                    else np.linalg.norm(v[list(part), head] @ output[head * group : (head + 1) * group], axis=-1),
                    None if inputs is None else inputs[read],
                )
    told = {name: getattr(policy, name) for name in ("scope", "sinks", "slack")}
    return oracle.survivors(scores, budget, prefix=prefix, **told)


hidden = jax.jit(transformer.hidden)


def around(params, layer: int, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """How long what a layer's attention reads is for each token, and its output projection by query head [N, H, D]."""
    own, config = params.layers[layer], params.config
    x = np.asarray(params.embed, np.float64)[np.asarray(text)]
    if layer:
        below = params.replace(layers=params.layers[:layer], config=config.with_depth(layer))
        x = np.asarray(hidden(below, np.asarray([text], np.int32)), np.float64)[0]
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * np.asarray(own.attn_norm)
    output = np.asarray(own.attn.o, np.float64).T.reshape(config.num_heads, config.head_dim, -1)
    return np.linalg.norm(x, axis=-1), output


@pytest.mark.parametrize(
    "policy",
    [
        KVzip(budget=12, chunk=11, overlap=3, sinks=2),
        pytest.param(KVzip(budget=12, chunk=11, overlap=3, sinks=2, scope="layer", prefix=0), marks=pytest.mark.slow),
        pytest.param(KVzip(budget=12, chunk=11, overlap=3, sinks=2, slack=2.0, plus=True), marks=pytest.mark.slow),
        pytest.param(
            KVzip(budget=12, chunk=20, overlap=0, sinks=2, scope="head", queries="repeat"), marks=pytest.mark.slow
        ),
        pytest.param(KVzip(budget=12, chunk=11, overlap=3, sinks=2, prefix=9), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_reads_again(policy, letters):
    """Words, which are text of the tokenizer, the last tokens of the part before, and the part; ragged rows.

    Some begin as the template does, wholly or in part: these tokens are kept, and no part has them.
    """
    template = "{% for m in messages %}begin{{ m.content }} {% endfor %}{% if add_generation_prompt %}A {% endif %}"
    params = letters.replace(tokenizer=tokenizer_of(letters, template))
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 62, size=n).tolist() for n in (50, 11, 23, 5)]
    begins = params.tokenizer.encode("begin", add_special=False)
    common = [5, 0, 3, 0]
    for prompt, count in zip(prompts, common, strict=True):
        prompt[: count + 1] = [*begins[:count], (begins[min(count, 4)] + 1) % 62]
    engine = kvjax.Engine(params, policy, batch=4, prompt_len=50, max_new_tokens=4)
    state, _ = engine.prefill(prompts, [4] * 4)
    encode = params.tokenizer.encode
    words = [encode(text, add_special=False) for text in (FIRST, THEN, " A ")]
    assert engine.specs[0].words == ((FIRST, *map(tuple, words[::2])), (THEN, *map(tuple, words[1:])))
    assert engine.specs[0].template == (tuple(begins) if policy.prefix is None else ())
    own = zip(engine.layers, state.caches, strict=True)
    caches = [jax.device_get(jax.jit(layer.view)(cached)) for layer, cached in own]
    for row, prompt in enumerate(prompts):
        prefix = common[row] if policy.prefix is None else policy.prefix
        expected = literal(params, prompt, policy, words, policy.budget, prefix)
        for slots, heads in zip(caches, expected, strict=True):
            held = zip(slots.pos[row], slots.weight[row] > 0, strict=True)
            assert [sorted(p[there].tolist()) for p, there in held] == heads


def tokenizer_of(letters, template):
    """The tokenizer of letters with another template."""
    made = type(letters.tokenizer)
    return made(letters.tokenizer.backend, eos=letters.tokenizer.eos, chat_template=template)


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (None, ""),
        ("{{ raise_exception('no') }}", ""),
        ("{{ 1 }}", ""),
        ("{{ messages[0].content }}z\ufffcA", "z\ufffcA"),
    ],
)
def test_a_model_may_have_no_template_that_opens_an_answer(template, opening, letters):
    layers = [KVzip().layer(spec) for spec in layer_specs(letters.config, 1, 8, 8, jnp.float32)]
    words = replay.words_of(layers, tokenizer_of(letters, template))
    assert [text for text, *_ in words] == [FIRST, THEN]
    assert {after for *_, after in words} == {tuple(letters.tokenizer.encode(opening, add_special=False))}
    assert replay.words_of(layers, None) == ()
    assert replay.template_of(layers, tokenizer_of(letters, template)) == ()
    assert replay.template_of(layers, None) == ()


def test_programs_without_words_do_not_take_weights_with_a_tokenizer(letters):
    """Those for a shape alone have no words, and a model without a tokenizer none either."""
    shapes = {"policy": "kvzip:16", "prompt_len": 40, "max_new_tokens": 4}
    engine = kvjax.Engine(letters.config, dtype=letters.dtype, **shapes)
    assert engine.specs[0].words == ()
    with pytest.raises(ValueError, match=r"kvzip prefills words of its own.*compile with the weights"):
        engine.of(letters)
    assert engine.of(letters.replace(tokenizer=None)).policy == engine.policy
    assert kvjax.Engine(letters, **shapes).of(letters).specs[0].words


def test_other_layers_of_a_model_are_as_without_it(tiny):
    """Layers that do not want a second reading keep what they keep, and it is of the whole prompt in all layers."""
    prompt, options = list(range(40)), {"batch": 1, "prompt_len": 40, "max_new_tokens": 4}
    snap = SnapKV(budget=16, window=4)
    mixed = kvjax.Engine(tiny, by_layer([snap, KVzip(budget=16, chunk=9)]), **options)
    alone, all_of_it = (kvjax.Engine(tiny, policy, **options) for policy in (snap, KVzip(budget=16, chunk=9)))
    states = [engine.prefill([prompt])[0] for engine in (mixed, alone, all_of_it)]
    for got, want in ((states[0].caches[0], states[1].caches[0]), (states[0].caches[1], states[2].caches[1])):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_layers_with_budgets_of_their_own_share_a_reading(tiny):
    """As in a pyramid: the prompt is read again once, and each layer keeps what it would if it alone wanted that."""
    prompt, options = list(range(40)), {"batch": 1, "prompt_len": 40, "max_new_tokens": 4}
    parts = [KVzip(budget=b, chunk=9, sinks=2, scope="model", slack=s) for b, s in ((20, 2.0), (12, 1.5))]
    engine = kvjax.Engine(tiny, by_layer(parts), **options)
    assert len(replay.replays(engine.layers)) == 1
    state, _ = engine.prefill([prompt])
    for i, others in enumerate(([parts[0], Full()], [Full(), parts[1]])):
        alone, _ = kvjax.Engine(tiny, by_layer(others), **options).prefill([prompt])
        for got, want in zip(jax.tree.leaves(state.caches[i]), jax.tree.leaves(alone.caches[i]), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
    pyramid = get_policy("pyramid(kvzip:16,scope=model,sinks=2; beta=2)").bind(TINY)
    assert len({policy.budget for policy in pyramid.layers}) == 2
    assert len({policy.replay for policy in pyramid.layers}) == 1


def test_values_are_weighed_once(monkeypatch, tiny):
    """In every layer, however many parts there are."""
    weighed = []

    def counted(*args):
        weighed.append(args)
        return projected_norms(*args)

    monkeypatch.setattr("kvjax.policies.kvzip.projected_norms", counted)
    layers = [KVzip(budget=16, chunk=9, plus=True).layer(spec) for spec in layer_specs(TINY, 1, 40, 4, jnp.float32)]
    tokens, length = np.zeros((1, 64), np.int32), to_jax([40])
    jax.eval_shape(lambda tokens: replay.prefill(tiny, tokens, length, length + 4, layers), tokens)
    assert len(weighed) == len(layers)


def test_groups_of_heads_share_a_budget_in_each_layer(tiny, caplog):
    """Half of the heads at twice the budget, or kept whole: each group as if a layer had no other heads, which is logged."""
    prompt, options = list(range(40)), {"batch": 1, "prompt_len": 40, "max_new_tokens": 4}
    groups = {"a": KVzip(budget=20, chunk=9, sinks=2), "b": KVzip(budget=10, chunk=9, sinks=2), "c": Full()}
    labels = [["a", "b"], ["b", "c"]]
    engine = kvjax.Engine(tiny, by_head(groups, labels), **options)
    assert "each layer has its own budget" in caplog.text
    state, _ = engine.prefill([prompt])
    whole = kvjax.Engine(tiny, KVzip(budget=10, chunk=9, sinks=2, scope="head"), **options)
    one = kept_by(whole, whole.prefill([prompt])[0])
    got = kept_by(engine, state)
    assert [[len(head) for head in layer] for layer in got] == [[20, 10], [10, 40]]
    assert got[0][1] == one[0][1]
    assert got[1][0] == one[1][0]


def kept_by(engine, state) -> list[list[list[int]]]:
    """Positions that the heads of each layer keep of the only row."""
    views = [jax.jit(layer.view)(own) for layer, own in zip(engine.layers, state.caches, strict=True)]
    return [[sorted(np.asarray(p)[np.asarray(p) >= 0].tolist()) for p in view.pos[0]] for view in views]


def test_budgets_have_room_for_the_template():
    """A fraction of a short sequence is that of the template at least, unless a number of first tokens is given."""
    spec = dataclasses.replace(make_case(0, [60], 4).spec, template=(1,) * 30)
    assert KVzip(budget=0.2).max_budget(spec) == 30
    assert KVzip(budget=0.2, prefix=0).max_budget(spec) == 13


# Memory.


@pytest.mark.parametrize(("scope", "share"), [("layer", 0.3), ("head", 0.3), ("model", 0.33)])
def test_what_is_dropped_holds_no_memory(scope, share):
    """Three tenths of the full cache, but for what is known of slots; all layers together have `slack` as much, which is told."""
    shape = PRESETS["llama-3.1-8b"], 2, 4096 * 3, 16, jnp.bfloat16
    held = KVzip(budget=0.3, scope=scope).nbytes(*shape)
    assert held / Full().nbytes(*shape) == pytest.approx(share, rel=0.05)


def test_layers_with_a_sliding_window_keep_everything():
    spec = dataclasses.replace(make_case(0, [60], 4).spec, window=10)
    layer = KVzip(budget=16).layer(spec)
    assert layer.attention == "dense"
    assert not layer.replays


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KVzip(chunk=0), "chunk=0 is too small. Give 1"),
        (lambda: KVzip(slack=0.5), "slack=0.5 is too small. Give 1"),
        (lambda: KVzip(scope="head_level"), "scope='head_level'"),
        (lambda: KVzip(budget=4, prefix=9), "4 slots, but the policy always keeps the first 9 tokens"),
        (lambda: quantized(KVzip()).bind(TINY), "changes its cache while decoding"),
        (
            lambda: by_head({"a": KVzip(), "b": SnapKV()}, [["a", "b"]] * 2).layer(make_case(0, [9], 1).spec),
            "'kvzip' reads a prompt again, after which 'snapkv' cannot choose",
        ),
        (
            lambda: KVzip(budget=9).layer(dataclasses.replace(make_case(0, [60], 4).spec, template=(1,) * 10)),
            "9 slots, but the chat template's 10 first tokens are always kept",
        ),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()


def test_a_layer_alone_says_that_nothing_was_read_again():
    case = make_case(0, [20], 1)
    layer = KVzip(budget=8).layer(case.spec)
    with pytest.raises(PolicyError, match="read a second time"):
        layer.prefill(
            PromptKV.of(ROPE, *(to_jax(x[:, :20]) for x in (case.q, case.k, case.v)), *[to_jax([20])] * 2), {}
        )
