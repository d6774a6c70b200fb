"""Draws what each method keeps or reads of a text, on the default model: `python docs/draw_methods.py [METHOD ...]`.

Writes docs/pictures/METHOD.png for every registered policy that needs no trained weights, or those named; it takes some minutes on a CPU.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import kvjax
from kvjax import plots
from kvjax._util.extras import import_matplotlib
from kvjax.analysis import recall
from kvjax.analysis.recording import record
from kvjax.policies import FP8, KIVI, ShadowKV, TurboQuant, policies
from kvjax.runtime.inspection import retained_positions

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
BUDGET = 0.25
NEW_TOKENS = 64
READ = "What queries read: each row is a step, white is kept and not read, grey is yet to be written"
LAYER = 15
"""The layer that is looked at where one has to do, in the middle of the model."""


def kept(params: Any, ids: list[int], name: str) -> Any:
    """Which tokens the cache holds, step by step."""
    policy = kvjax.get_policy(name, budget=BUDGET)
    return plots.draw({f"{name}, {_share(policy)}": retained_positions(params, ids, policy, NEW_TOKENS)})


def read(params: Any, ids: list[int], name: str) -> Any:
    """Which tokens queries of one layer read, step by step: those of the prompt, and then of what the full cache writes."""
    continued = kvjax.generate(params, ids, policy="full", max_new_tokens=NEW_TOKENS, ignore_eos=True)
    text = [*ids, *continued.tokens][: len(ids) + NEW_TOKENS]
    policy = kvjax.get_policy(name, budget=BUDGET)
    chosen = recall.replay(policy, record(params, text)[LAYER], len(ids))
    tokens = np.arange(len(text))
    written = tokens < len(ids) + 1 + np.arange(len(chosen.chosen))[:, None]
    # Logits are given where a query may choose; all else that is written, the latest tokens, is read anyway.
    anyway = np.all(np.isneginf(chosen.logits), axis=1) & written
    shares = np.where(anyway, 1.0, chosen.chosen.mean(axis=1))
    return plots.draw({f"{name}, {_share(policy)}, layer {LAYER}": shares}, READ, "share of heads that read the token")


def exact(params: Any, ids: list[int], policy: ShadowKV) -> Any:
    """Which tokens ShadowKV keeps with their exact keys, step by step; of the others keys are rebuilt."""
    engine = kvjax.Engine(params, policy, prompt_len=len(ids), max_new_tokens=NEW_TOKENS)
    state, _ = engine.prefill([ids])
    steps: list[np.ndarray] = []
    for _ in range(NEW_TOKENS):
        positions = np.concatenate([np.asarray(x.cache.pos)[0] for x in state.caches])
        steps.append(
            np.stack([np.any(positions == p, axis=1) for p in range(len(ids) + NEW_TOKENS - 1)], axis=1).mean(0)
        )
        if len(steps) < NEW_TOKENS:
            state, _, _ = engine.decode(state, 1)
    title = "Which keys are exact: each row is a step, white is rebuilt from low rank, grey is yet to be written"
    return plots.draw({f"{policy}": np.stack(steps)}, title, "share of heads with the exact key")


def bits(params: Any, ids: list[int], methods: dict[str, KIVI | TurboQuant | FP8]) -> Any:
    """Keys of one head, and the quantisation errors of methods."""
    figures, _ = import_matplotlib()
    keys = _keys(params, ids, kvjax.Full())
    panels = {"keys": keys} | {
        f"error in {width}": _keys(params, ids, method) - keys for width, method in methods.items()
    }
    figure = figures.Figure(figsize=(7.5, 4.2), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        limit = 4.0 if name == "keys" else 1.0
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="PuOr", vmin=-limit, vmax=limit)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("channel")
        figure.colorbar(image, ax=axes, orientation="horizontal", fraction=0.05, pad=0.02, extend="both")
        if name == "keys":
            axes.set_ylabel("position in tokens")
    exact = ": the latest tokens are kept exactly" if any(isinstance(each, KIVI) for each in methods.values()) else ""
    figure.suptitle(f"Keys of one head of layer {LAYER}{exact}", fontsize=11)
    return figure


def _keys(params: Any, ids: list[int], policy: kvjax.Policy) -> np.ndarray:
    engine = kvjax.Engine(params, policy, prompt_len=len(ids), max_new_tokens=1)
    state, _ = engine.prefill([ids])
    cache = engine.layers[LAYER].view(state.caches[LAYER])
    order = np.argsort(np.asarray(cache.pos[0, 0])[: len(ids)])
    return np.asarray(cache.k[0, 0])[order]


def _share(policy: kvjax.Policy) -> str:
    return f"budget {BUDGET:.0%}" if policy.info.takes_budget else "no budget"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=[*policies(trained=False)])
    params = kvjax.load()
    assert params.tokenizer is not None
    ids = params.tokenizer.encode((DOCS / "loomings.txt").read_text(encoding="utf-8").strip())
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().methods:
        if name == "fp8":
            figure = bits(params, ids, {"8-bit floats": FP8()})
        elif name in ("kivi", "turboquant"):
            method = KIVI if name == "kivi" else TurboQuant
            figure = bits(params, ids, {f"{width} bits": method(bits=width) for width in (4, 2)})
        elif name == "shadowkv":  # with fewer outliers than by default, which would be most of so short a text
            figure = exact(params, ids, ShadowKV(budget=BUDGET, outlier_chunks=4))
        elif policies()[name].about.memory == "sparse":
            figure = read(params, ids, name)
        else:
            figure = kept(params, ids, name)
        path = PICTURES / f"{name}.png"
        plots.save(figure, path)
        # 64 colours are a fraction of the bytes, and look the same.
        Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
        print(path.relative_to(DOCS.parent), path.stat().st_size)


if __name__ == "__main__":
    main()
