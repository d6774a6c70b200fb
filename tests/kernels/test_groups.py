"""Query heads per KV head on a GPU: kernels pad groups that are no power of two."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from kernels import test_gather_attention, test_packed_decode_attention
from kernels.lowering import on

from kvjax.pallas_kernels import (
    centroid_scores,
    decode_attention,
    gather_attention,
    packed_decode_attention,
    page_scores,
    sharded_decode_attention,
)
from kvjax.pallas_kernels.decode_attention import CacheShard

ROWS, KV_HEADS, SLOTS, DIM = 2, 2, 256, 128


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def decoding(group):
    cache, weight = shaped(ROWS, KV_HEADS, SLOTS, DIM), shaped(ROWS, KV_HEADS, SLOTS, dtype=jnp.float32)
    return partial(decode_attention, scale=0.1), (shaped(ROWS, KV_HEADS * group, DIM), cache, cache, weight)


def sharded(group):
    def attend(q, *arrays):
        return sharded_decode_attention(q, [CacheShard(*arrays[:3], (0,)), CacheShard(*arrays[3:], (1,))], scale=0.1)

    cache, weight = shaped(ROWS, 1, SLOTS, DIM), shaped(ROWS, 1, SLOTS, dtype=jnp.float32)
    return attend, (shaped(ROWS, KV_HEADS * group, DIM), *2 * (cache, cache, weight))


def packed(group):
    given = test_packed_decode_attention.draw(1, KV_HEADS, group, 96, 32, "bfloat16", 4, 32, 32, (95, 66))
    return partial(packed_decode_attention, bits=4, scale=0.1), given


def gathered(group):
    given = test_gather_attention.draw(0, ROWS, KV_HEADS * group, KV_HEADS, KV_HEADS, 64, 1, 40, 64, "bfloat16")
    return partial(gather_attention, scale=0.1), given


def pages(group):
    given = shaped(ROWS, KV_HEADS * group, DIM), shaped(ROWS, KV_HEADS, 64, 2 * DIM), shaped(ROWS, dtype=jnp.int32)
    return partial(page_scores, page=16), given


def centroids(group):
    return centroid_scores, (shaped(ROWS, KV_HEADS * group, DIM), shaped(ROWS, KV_HEADS, 64, DIM, dtype=jnp.float32))


OPERATIONS = {
    "decode_attention": decoding,
    "sharded_decode_attention": sharded,
    "packed_decode_attention": packed,
    "gather_attention": gathered,
    "page_scores": pages,
    "centroid_scores": centroids,
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_supports_any_group(name, group):
    function, given = OPERATIONS[name](group)
    with on():
        text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert f'name = "{name}"' in text
