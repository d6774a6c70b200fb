"""The ChunkKV variants, by chunk size and by layers that reuse a choice, and the methods that they are compared with."""

import dataclasses

from kvjax.policies import H2O, ChunkKV, Policy, SnapKV, StreamingLLM

CHUNK = 10
"""Tokens in a chunk, in all of the paper's experiments but those on chunk sizes."""

SIZES = (3, 5, 10, 20, 30)
REUSE = (2, 3, 4)


def chunks(size: int) -> str:
    """The name in rows of ChunkKV with chunks of `size` tokens."""
    return "chunkkv" if size == CHUNK else f"chunkkv, chunks of {size}"


def reusing(layers: int) -> str:
    """The name in rows of ChunkKV where `layers` layers share indices."""
    return f"chunkkv, {layers} layers share indices"


def variants(budget: int, window: int) -> dict[str, Policy]:
    """ChunkKV as in the paper, with other chunk sizes, and with index reuse."""
    plain = ChunkKV(budget=budget, chunk=CHUNK, window=window)
    return {
        **{chunks(size): dataclasses.replace(plain, chunk=size) for size in SIZES},
        **{reusing(layers): dataclasses.replace(plain, reuse=layers) for layers in REUSE},
    }


def others(budget: int, window: int) -> dict[str, Policy]:
    """SnapKV, H2O and StreamingLLM with as many slots for the prompt."""
    return {
        "snapkv": SnapKV(budget=budget, window=window),
        "h2o": H2O(budget=budget),
        "streaming_llm": StreamingLLM(budget=budget),
    }
