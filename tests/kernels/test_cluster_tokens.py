"""The tokens of the best clusters, by every implementation, against a loop over clusters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import Always, cluster_tokens
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.top_k import cluster_tokens_pallas_triton as pallas_triton

BATCH, HEADS, GROUP = 3, 2, 4


@pytest.fixture(params=["xla", "gpu"])
def compute(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""
    return jitted(request.param)


@functools.cache
def jitted(implementation):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(cluster_tokens, **options), static_argnames="size")


def draw(seed, clusters, tokens, room):
    """Clusters of all sizes, some of them empty; scores with equal ones, infinities, zeros of both signs and NaN."""
    random = np.random.default_rng(seed)
    scores = np.round(2 * random.normal(size=(BATCH, HEADS, GROUP, clusters))).astype(np.float32)
    scores[0, 0] = random.normal(size=(GROUP, clusters))
    scores[1, 0, :, ::3] = -np.inf
    scores[1, 0, :, 1::5] = np.inf
    scores[1, 1, :, ::2] = np.nan
    scores[2, 0] *= 0
    ends = np.sort(random.integers(0, tokens + 1, size=(BATCH, HEADS, clusters)), axis=-1)
    starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    sizes = ends - starts
    order = random.permuted(np.tile(np.arange(tokens), (BATCH, HEADS, 1)), axis=-1)
    return to_jax(scores), *(to_jax(x, jnp.int32) for x in (sizes, starts, order, room))


def taken(scores, sizes, starts, order, room):
    """The tokens that one query takes, in order."""
    best = sorted(range(len(scores)), key=lambda i: (np.isnan(scores[i]), -float(scores[i])))  # a stable sort
    tokens = [token for i in best for token in order[starts[i] : starts[i] + sizes[i]]]
    return tokens[:room]


def check(out, inputs, size):
    index, live = (np.asarray(x) for x in out)
    scores, sizes, starts, order, room = (np.asarray(x) for x in inputs)
    assert index.shape == live.shape == (BATCH, HEADS, GROUP, size)
    assert ((index >= 0) & (index < order.shape[-1])).all()
    for row, head, query in np.ndindex(BATCH, HEADS, GROUP):
        meant = live[row, head, query]
        got = index[row, head, query][meant]
        held = row, head
        assert sorted(got) == sorted(taken(scores[row, head, query], sizes[held], starts[held], order[held], room[row]))
        assert meant[: len(got)].all(), "those that are meant come first"


def test_rounding_does_not_decide(compute):
    """Between clusters that are equal but for it, the first is taken whole, and the last that fits is cut."""
    inputs = draw(5, 40, 300, [60, 150, 0])
    scores = to_jax(np.random.default_rng(0).integers(1, 4, inputs[0].shape), jnp.float32)
    noise = 1 + 5e-7 * np.random.default_rng(1).standard_normal(scores.shape)
    check(compute(to_jax(scores * noise, jnp.float32), *inputs[1:], size=160), (scores, *inputs[1:]), 160)


@pytest.mark.parametrize(
    ("clusters", "tokens", "size", "room"),
    [
        (13, 90, 24, [24, 7, 1]),  # budgets of their own, less than there is
        (1, 5, 3, [0, 3, 2]),
        (40, 30, 50, [50, 30, 0]),  # more room than tokens, and many empty clusters
        (130, 700, 300, [300, 299, 128]),
    ],
)
def test_equals_a_loop(compute, clusters, tokens, size, room):
    inputs = draw(clusters, clusters, tokens, room)
    check(compute(*inputs, size=size), inputs, size)


def test_several_programs_for_one_query():
    """Each of a block of places, the last of them partly beyond the end."""
    inputs = draw(1, 20, 100, [70, 33, 16])
    check(pallas_triton.cluster_tokens(*inputs, 70, interpret=True, tuning={"places": 16, "warps": 1}), inputs, 70)


@pytest.mark.parametrize("places", [16, 64])
@pytest.mark.parametrize("implementation", ["xla", "gpu"])
def test_first_and_latest_tokens_besides(implementation, places):
    """After the clusters' places: the first tokens, the tail up to what each row has seen, and places that nothing is meant in."""
    size, first, latest, total = 30, 3, 9, 48
    inputs = draw(2, 20, 100, [30, 7, 0])
    tail, seen = [60, 3, 95], [66, 3, 100]
    always = Always(first, latest, to_jax(tail, jnp.int32), to_jax(seen, jnp.int32), total)
    if implementation == "xla":
        index, live = cluster_tokens(*inputs, size, always, implementation="xla")
    else:
        tuning = {"places": places, "warps": 1}
        index, live = pallas_triton.cluster_tokens(*inputs, size, always, interpret=True, tuning=tuning)
    index, live = np.asarray(index), np.asarray(live)
    assert index.shape == live.shape == (BATCH, HEADS, GROUP, total)
    check((index[..., :size], live[..., :size]), inputs, size)
    assert ((index >= 0) & (index < 100)).all()
    for row in range(BATCH):
        wanted = [*range(first), *range(tail[row], min(tail[row] + latest, seen[row]))]
        for head, query in np.ndindex(HEADS, GROUP):
            assert index[row, head, query, size:][live[row, head, query, size:]].tolist() == wanted


def test_too_many_clusters_are_refused():
    many = to_jax(np.zeros((1, 1, 16385)), jnp.int32)
    with pytest.raises(Unsupported, match="16385 clusters do not fit in registers; 16384 do"):
        cluster_tokens(
            to_jax(np.zeros((1, 1, 1, 16385)), jnp.float32),
            many,
            many,
            many,
            to_jax([1]),
            1,
            implementation="gpu",
            interpret=True,
        )
