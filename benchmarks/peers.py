"""Measure transformers and kvpress at the shapes and batch sizes of kvjax, with random weights (`benchmarks.decode --peers`).

torch, transformers and kvpress are required. If one is missing, the row has the error. If kvpress needs an older
version of transformers, give both in a folder: `benchmarks.decode --kvpress-path`.

| program | what runs |
| --- | --- |
| `transformers` | the default: a cache that grows, "eager" |
| `transformers-compiled` | a static cache, and `torch.compile` of the decode step |
| `kvpress` | SnapKV and ChunkKV that drop four fifths of the prompt, "eager" |
"""

import contextlib
import dataclasses
import gc
import inspect
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from kvjax.bench.case import Case
from kvjax.bench.floor import bandwidth
from kvjax.bench.worker import serve

PROGRAMS = ("transformers", "transformers-compiled", "kvpress")
"""Values of `Case.program`."""

RATIO = 0.8
"""Share of the prompt that kvpress drops."""

STEPS = 64
"""Timed tokens, after the same number to warm up."""


def cases(ours: Sequence[Case]) -> list[Case]:
    """Return the peers' cases: each shape, length and batch size of kvjax's cases that have a prefill. Weights are floats."""
    fixed = [case for case in ours if case.prefill and isinstance(case.batch, int)]
    own = {"policy": "full", "settings": {}, "new_tokens": 2 * STEPS + 1, "weights": "float"}
    plain = [dataclasses.replace(case, **own) for case in fixed]
    shapes = [case for i, case in enumerate(plain) if case not in plain[:i]]
    asked = [(program, "full", {}) for program in PROGRAMS[:2]]
    asked += [(PROGRAMS[2], policy, {"compression_ratio": RATIO}) for policy in ("snapkv", "chunkkv")]
    return [
        dataclasses.replace(case, program=program, policy=policy, settings=settings)
        for program, policy, settings in asked
        for case in shapes
    ]


def measure(case: Case) -> dict[str, Any]:
    """Return the measured fields of a row.

    Raises:
        ImportError: torch, transformers or kvpress is missing.
        RuntimeError: torch ran out of memory, or finds no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("peers are measured on a CUDA device, and torch finds none here")
    from transformers import DynamicCache, StaticCache

    assert isinstance(case.batch, int)
    if case.program == "kvpress":  # raises before a model is made
        import kvpress  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]

    torch.compiler.reset()  # free programs of other cases, and forget that sizes changed
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = _model(case)
    tokens = torch.randint(0, case.config.vocab_size, (case.batch, case.context), device="cuda")
    compiled = case.program == "transformers-compiled"
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if compiled else model.forward
    named = compiled and "cache_position" in inspect.signature(model.forward).parameters  # of older versions
    cache: Any = None
    token: Any = None
    ttft = []
    with torch.no_grad() if compiled else torch.inference_mode():
        for _ in range(3):
            size = -(-(case.context + case.new_tokens) // 64) * 64  # rows of the mask are then aligned
            cache = StaticCache(config=model.config, max_cache_len=size) if compiled else DynamicCache()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            with _pressed(case, model):
                logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)
            token.cpu()
            ttft.append(time.perf_counter() - begun)
        place = torch.full((case.batch, 1), case.context, device="cuda")
        calls = []
        for _ in range(2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(STEPS):
                at = {"position_ids": place} | ({"cache_position": place[0]} if named else {})
                token = step(token, past_key_values=cache, **at).logits[:, -1:].argmax(-1).clone()
                place += 1
            torch.cuda.synchronize()
            calls.append(time.perf_counter() - begun)
    cache_bytes = sum(x.nbytes for x in _tensors(cache))
    weights = sum(x.nbytes for x in model.parameters()) - (
        0 if case.config.tied else model.get_input_embeddings().weight.nbytes
    )
    pairs = case.config.cache_bytes_per_token(2) * case.batch * (_kept(case) + STEPS)
    rate = bandwidth(torch.cuda.get_device_name())
    tpot = calls[-1] / STEPS
    return {
        "batch_run": case.batch,
        "ttft_s": min(ttft[1:]),
        "ttft_all_s": ttft,
        "tpot_ms": 1e3 * tpot,
        "tpot_all_ms": [1e3 * seconds / STEPS for seconds in calls],
        "floor_ms": None if rate is None else 1e3 * (weights + pairs) / rate,
        "times_floor": None if rate is None else tpot * rate / (weights + pairs),
        "decode_s": sum(calls),
        "latency_s": ttft[-1] + sum(calls),
        "tokens_per_s": case.batch / tpot,
        "cache_bytes": cache_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "compile_s": None,
        "wall_s": time.perf_counter() - start,
        "versions": {name: _version(name) for name in ("torch", "transformers", "kvpress")},
    }


def _model(case: Case) -> Any:
    """A random model of the case's shape, in bfloat16 on the device."""
    import torch
    import transformers

    c = case.config
    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    if c.family not in kinds:
        raise ValueError(f"{case.shape} is a {c.family} model; peers are measured on {', '.join(kinds)}")
    config = kinds[c.family](
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=max(c.max_position, case.context + case.new_tokens),
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def _pressed(case: Case, model: Any) -> Any:
    """The context in which kvpress compresses what is read; of transformers alone, one that does nothing."""
    if case.program != "kvpress":
        return contextlib.nullcontext()
    import kvpress  # pyright: ignore[reportMissingImports]

    press = kvpress.SnapKVPress(compression_ratio=RATIO)
    return (press if case.policy == "snapkv" else kvpress.ChunkKVPress(press=press))(model)


def _kept(case: Case) -> int:
    return round(case.context * (1 - RATIO)) if case.program == "kvpress" else case.context


def _tensors(cache: Any) -> list[Any]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Answer cases, see `kvjax.bench.worker`."""
    serve(lambda: {"versions": {name: _version(name) for name in ("torch", "transformers", "kvpress")}}, _answer)


def _answer(fields: dict[str, Any]) -> dict[str, Any]:
    return measure(Case(**fields))


if __name__ == "__main__":
    main()
