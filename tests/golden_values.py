"""Golden values: what every policy and every transform generates and keeps on a small model, and the script that records them.

`tests/policies/test_golden.py` compares this version with `tests/golden_values.json`. A change that is meant to alter a policy's results records
that policy again, and its commit says so:

    python tests/golden_values.py --only compactor              # from the repository's root
    PYTHONPATH=OTHER_CHECKOUT python tests/golden_values.py     # all values, as another version of kvjax computes them

The script refuses to record values that rounding could alter. It also runs every case on weights with relative noise of `NOISE`, which is larger
than float32's rounding: tokens and kept positions must stay the same, and log-probabilities nearly so. Another `--seed` makes another model.
"""

import argparse
import functools
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from policies.facts import facts_of
from policies.surrogates import model_inputs

import kvjax
from kvjax._util.any_rank import any_rank
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, Params, abstract
from kvjax.policies import (
    Policy,
    by_head,
    by_layer,
    chunk_token_hybrid,
    chunkkv,
    critical,
    get_policy,
    offloaded,
    policies,
    prompt_only,
    pyramid,
    quantized,
    recompress,
    then,
    thresholded,
)
from kvjax.runtime.engine import Engine

FILE = Path(__file__).with_suffix(".json")

SEED = 2
"""Of the model's weights and the prompts: chosen so that no decision is a near-tie."""

NOISE = 3e-6
"""Relative noise under which decisions must stay the same."""

MOVES = 3e-5
"""By how much that noise may move a log-probability. (Least squares move more: `LOOSE`.)"""

CODES_MOVE = {"fp8": 3e-4}
"""The same for policies of which noise moves numbers to the next code, a sixteenth away."""

CONFIG = ModelConfig.uniform("llama", 12, 32, 48, 2, 4, 2, 16, 256, RopeConfig(theta=100.0, dim=16))
"""2 layers of width 32, 4 query heads on 2 KV heads of 16. With a vocabulary of 12, float32 rounds log-probabilities by less than 1e-6."""

LENGTHS = 45, 23
"""Tokens of the prompts of a batch."""

NEW = 12
"""Tokens that are generated in each row."""

LABELS = ("a", "b"), ("b", "a")
"""The groups of KV heads [layer][head] of policies that treat heads differently."""


def cases() -> dict[str, Callable[[], Policy]]:
    """All policies and transforms by name, with budgets and regions small enough that each compresses prompts of `LENGTHS`."""
    ours = {name: cls for name, cls in policies().items() if cls.__module__.startswith("kvjax.")}
    found: dict[str, Callable[[], Policy]] = {
        name: functools.partial(get_policy, name, **facts_of(name).golden, **model_inputs(cls, CONFIG))
        for name, cls in ours.items()
    }

    def made(name: str) -> Policy:
        return found[name]()

    return found | {
        "by_head": lambda: by_head({"a": made("treekv"), "b": made("snapkv")}, LABELS),
        "by_layer": lambda: by_layer([made("snapkv"), made("streaming_llm")]),
        "chunk_token_hybrid": lambda: chunk_token_hybrid(2, made("chunkkv"), made("snapkv"), 1),
        "chunkkv(expected_attention)": lambda: chunkkv(made("expected_attention"), chunk=4),
        "chunkkv(snapkv)": lambda: chunkkv(made("snapkv"), chunk=5, spiky=2),
        "critical": lambda: critical(made("snapkv")),
        "offloaded": lambda: offloaded(made("snapkv")),
        "offloaded(clusterkv)": lambda: offloaded(made("clusterkv"), steps=2),
        "prompt_only": lambda: prompt_only(made("treekv")),
        "prompt_only(tova)": lambda: prompt_only(made("tova")),
        "pyramid": lambda: pyramid(made("chunkkv"), beta=4),
        "quantized": lambda: quantized(made("snapkv"), bits=4, group=4, residual=8),
        "quantized(turboquant)": lambda: quantized(
            made("snapkv"), bits=4, scheme="turboquant", values="rotated", signs=3
        ),
        "recompress": lambda: recompress(made("snapkv"), every=4),
        "recompress(keep)": lambda: recompress(made("tova"), every=4, prompt="keep"),
        "then": lambda: then(made("snapkv"), get_policy("quest:8,page=4,dense_layers=1")),
        "thresholded": lambda: thresholded(made("knorm"), -4.0, window=4),
    }


def record(name: str, params: Params, prompts: list[list[int]]) -> dict[str, Any]:
    """What one case generates and keeps, greedily.

    Returns:
        "tokens" and "logprobs" as [row][token]. What is kept after the "prompt" and at the "end" as [layer][row][head], each the ranges of
        positions as text. A merged slot counts at the position that the policy gives it.
    """
    engine = Engine(params, cases()[name](), batch=len(prompts), prompt_len=max(LENGTHS), max_new_tokens=NEW)

    @jax.jit
    def held(caches: Any) -> Any:
        slots = [any_rank(layer.view)(cache) for layer, cache in zip(engine.layers, caches, strict=True)]
        return [(each.pos, each.weight > 0) for each in slots]

    state, logprob = engine.prefill(prompts)
    token, prompt = np.asarray(state.token), _kept(held(state.caches))
    state, tokens, logprobs = engine.decode(state, NEW - 1)
    return {
        "tokens": np.column_stack([token, tokens[:, : NEW - 1]]).tolist(),
        "logprobs": np.column_stack([logprob, logprobs[:, : NEW - 1]]).astype(float).round(8).tolist(),
        "prompt": prompt,
        "end": _kept(held(state.caches)),
    }


def model(seed: int = SEED, noise: float = 0.0, draw: int = 0) -> Params:
    """Random weights, each made from the parameter's name; queries large enough for attention to have clear favourites.

    Args:
        noise: relative, on every number.
        draw: which noise.
    """

    def made(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if len(leaf.shape) == 1:
            values = random.uniform(0.8, 1.2, leaf.shape)
        else:
            scale = 1.0 if "embed" in name else leaf.shape[1] ** -0.5
            values = random.normal(
                0, scale * (2.0 if name.endswith(".q") else 0.5 if "head" in name else 1.0), leaf.shape
            )
        values *= 1 + noise * np.random.default_rng([draw, seed, zlib.crc32(name.encode())]).normal(size=leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(made, abstract(CONFIG, jnp.float32))


def texts(seed: int = SEED) -> list[list[int]]:
    """A prompt per row."""
    random = np.random.default_rng([seed, 1])
    return [random.integers(0, CONFIG.vocab_size, size).tolist() for size in LENGTHS]


def _kept(layers: Any) -> list[list[list[str]]]:
    return [
        [[_ranges(pos[live]) for pos, live in zip(*row, strict=True)] for row in zip(*layer, strict=True)]
        for layer in jax.device_get(layers)
    ]


def _ranges(positions: np.ndarray) -> str:
    """Sorted positions as text: "0-3 7"; one that several slots have is there as often."""
    ranges: list[list[int]] = []
    for place in sorted(positions.tolist()):
        if ranges and ranges[-1][1] == place - 1:
            ranges[-1][1] = place
        else:
            ranges.append([place, place])
    return " ".join(str(start) if start == stop else f"{start}-{stop}" for start, stop in ranges)


def fragile(name: str, seed: int, found: dict[str, Any], draws: int = 4) -> str | None:
    """How rounding could alter what a case gave, or None if it could not."""
    for draw in range(draws):
        other = record(name, model(seed, NOISE, draw), texts(seed))
        changed = [what for what in ("tokens", "prompt", "end") if found[what] != other[what]]
        if changed:
            return f"noise {draw} changes {' and '.join(changed)}"
        moved = float(np.abs(np.subtract(found["logprobs"], other["logprobs"])).max())
        if moved > CODES_MOVE.get(name, MOVES):
            return f"noise {draw} moves a log-probability by {moved:.1e}"
    return None


def main() -> int:
    """Record values; 1 if rounding could alter some."""
    parser = argparse.ArgumentParser(description="Record golden values of policies and transforms.")
    parser.add_argument("--only", nargs="*", help="cases to record again; the others stay as they are")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and prompts; for looking for another model")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # which take most of the time, and change roundings alone
    values = json.loads(args.out.read_text(encoding="utf-8")) if args.only else {}
    print(f"kvjax of {Path(kvjax.__file__).parent}")
    failed = False
    for name in args.only or cases():
        values[name] = record(name, model(args.seed), texts(args.seed))
        problem = fragile(name, args.seed, values[name])
        failed |= problem is not None
        print(f"{name}: {problem or 'recorded'}", flush=True)
    if not failed:
        lines = (f"{json.dumps(name)}: {json.dumps(values[name])}" for name in cases())
        args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
