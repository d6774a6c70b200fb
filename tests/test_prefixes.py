"""Stored states of prompts' beginnings: which are stored, and that nobody's tokens change."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import Params
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.engine import blocks
from kvjax.runtime.prefixes import BORDERS, Plan, Prefixes, blocks_from_start, has_fractions, keys_of
from kvjax.runtime.scheduler import Scheduler, Ticket

SIZE, NEW = 16, 12


@pytest.mark.parametrize("length", range(1, 60))
def test_blocks_keep_the_last_tokens_together(length: int) -> None:
    prompt = list(range(length))
    found = blocks_from_start(prompt, SIZE)
    assert [token for block in found for token in block] == prompt
    assert len(found) == len(list(blocks([prompt], SIZE)))
    assert len(found[-1]) == min(SIZE, length)
    assert all(0 < len(block) <= SIZE for block in found)
    assert all(len(block) == SIZE for block in found[:-2])


def test_keys_are_those_of_beginnings() -> None:
    one, two = list(range(50)), list(range(32)) + [63] * 18
    first, second = (keys_of(blocks_from_start(prompt, SIZE), SIZE, "me") for prompt in (one, two))
    assert len(first) == len(second) == 2
    assert first == second
    assert keys_of(blocks_from_start(one, SIZE), SIZE, "you")[0] != first[0]
    assert keys_of(blocks_from_start([1, *one[1:]], SIZE), SIZE, "me")[1] not in first
    assert keys_of(blocks_from_start(one[:31], SIZE), SIZE, "me") == []


def test_states_are_stored_at_shared_borders() -> None:
    store = Prefixes(2)
    a, b, c, d = (bytes([i]) for i in range(4))
    assert store.plan([a, b, c]) == Plan(0, None, 0)
    assert store.plan([a, b, d]) == Plan(0, None, 2)
    store.put(b, "ab")
    assert store.plan([a, b, c]) == Plan(2, "ab", 3)
    store.put(c, "abc")
    assert store.plan([a, b]) == Plan(2, "ab", 0)
    store.put(d, "abd")  # `c` is the least recently used
    assert store.plan([a, b, c]) == Plan(2, "ab", 3)
    for i in range(BORDERS):
        store.plan([i.to_bytes(4, "little")])
    assert store.plan([d]).state == "abd"
    assert store.plan([a]).keep == 0
    store.clear()
    assert len(store) == 0
    assert store.plan([a, b]) == Plan(0, None, 0)


def test_states_move_to_host_memory_and_back() -> None:
    """Within its limit in bytes. They come back with the same bits, types and places."""

    def state(n: int) -> dict[str, jax.Array]:
        floats = np.asarray([n, -0.0, np.nan, 1e-40], np.float32)
        return {"x": jnp.asarray(floats), "y": jnp.asarray(floats, jnp.bfloat16), "z": jnp.asarray(n)}

    size = sum(leaf.nbytes for leaf in state(0).values())
    store = Prefixes(2, 3 * size)
    keys = [bytes([i]) for i in range(7)]
    for i in range(6):
        store.put(keys[i], state(i))
        assert (len(store), store.on_host) == (min(i + 1, 2), max(min(i - 1, 3), 0))
        assert store.stored_bytes == store.on_host * size <= store.host_bytes
    assert store.plan(keys[:1]).done == 0  # the least recently used one is dropped
    for i in (1, 5, 3):
        found = store.plan(keys[i : i + 1]).state
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, state(i))
        for one, other in zip(found.values(), state(i).values(), strict=True):
            assert (one.dtype, np.asarray(one).tobytes()) == (other.dtype, np.asarray(other).tobytes())
    assert store.restored == 2
    assert (len(store), store.on_host, store.stored_bytes) == (2, 3, 3 * size)
    store.put(keys[2], state(2))  # anew, while an old one is in host memory
    assert store.stored_bytes == store.on_host * size == 3 * size
    assert [store.plan([key]).done for key in keys] == [0, 1, 1, 1, 1, 1, 0]
    del found
    gc.collect()
    arrays = len(jax.live_arrays())
    for _ in range(5):
        for key in keys[1:6]:
            store.plan([key])
    gc.collect()
    assert len(jax.live_arrays()) <= arrays  # no state keeps those alive that it was before
    store.clear()
    assert (len(store), store.on_host, store.stored_bytes) == (0, 0, 0)
    small = Prefixes(1, size - 1)
    small.put(keys[0], state(0))
    small.put(keys[1], state(1))
    assert (len(small), small.on_host) == (1, 0)


def test_fractions_are_found() -> None:
    for text, found in (("full", False), ("snapkv:64", False), ("snapkv:0.25", True), ("recompress(snapkv:0.5)", True)):
        assert has_fractions(kvjax.get_policy(text)) == found, text


def run(batch: Batch, jobs: list[Job]) -> list[Ticket]:
    scheduler = Scheduler(batch, steps=4)
    tickets = [scheduler.submit(job) for job in jobs]
    while scheduler.busy:
        scheduler.turn()
    batch.free()
    assert all(ticket.error is None for ticket in tickets)
    return tickets


def compare(tiny: Params, policy: str, *, fractions: bool = False) -> None:
    """Tokens and log-probabilities with and without stored states."""
    random = np.random.default_rng(3)
    begun = random.integers(0, 64, 70).tolist()
    prompts = [
        begun[:cut] + random.integers(0, 64, length).tolist() for cut, length in ((70, 9), (70, 25), (70, 2), (40, 30))
    ]
    totals = [NEW, 5, 7, 9]
    jobs = [Job(prompt, new, share="me") for prompt, new in zip(prompts, totals, strict=True)]
    sizes = {"rows": 2, "prompt_len": 96, "max_new_tokens": 2 * NEW, "block": SIZE, "anchor": "start"}
    plain = run(Batch(tiny, policy, **sizes), jobs)
    stored = run(Batch(tiny, policy, **sizes, prefixes=3), jobs)
    batch = Batch(tiny, policy, **sizes, prefixes=1, prefix_host_bytes=1 << 24)
    moved = run(batch, jobs + jobs)
    assert batch.prefixes.restored > 0 or fractions
    for one, other in zip(plain + plain, moved, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    for one, other in zip(plain, stored, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    expected = [0] * 4 if fractions else [0, 0, 48, 32]
    assert [ticket.reused for ticket in plain] == [0] * 4
    assert [ticket.reused for ticket in stored][:3] == expected[:3]
    others = run(
        Batch(tiny, policy, **sizes, prefixes=3), [Job(job.prompt, NEW, share=str(i)) for i, job in enumerate(jobs)]
    )
    assert [ticket.reused for ticket in others] == [0] * 4


def test_stored_states_change_no_token(tiny: Params) -> None:
    compare(tiny, "snapkv:40")


POLICIES = """
full treekv:40 adakv:40 cam:40 chelsea:64 chunkkv:40 h2o:40 kivi pyramidkv:40 quest:32 rkv:40 streaming_llm:40 tova:40
keydiff:40 knorm:40 recompress(snapkv:40;every=8) snapkv:0.4
"""


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES.split())
def test_stored_states_change_no_token_of_other_policies(tiny: Params, policy: str) -> None:
    compare(tiny, policy, fractions=has_fractions(kvjax.get_policy(policy)))


def test_prefixes_need_blocks(tiny: Params) -> None:
    sizes = {"rows": 1, "prompt_len": 32, "max_new_tokens": 4, "prefixes": 1}
    for more in ({}, {"block": 16}, {"anchor": "start"}):
        with pytest.raises(ValueError, match="give block, and anchor='start'"):
            Batch(tiny, "full", **sizes, **more)
