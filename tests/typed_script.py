# pyright: strict
"""A user's script: what most programs do with kvjax, in code that pyright has no complaint about in its strict mode.

It is checked as it stands here, and by `.ci/run` against the installed package, of which type checkers know what `py.typed` allows.
"""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

import kvjax
from kvjax import Policy, plots, register
from kvjax.cache import LayerSpec, PromptKV
from kvjax.evals import NeedleInAHaystack, compare, evaluate
from kvjax.evals.tasks import Inputs
from kvjax.policies import PolicyInfo, PromptScorer, SnapKV


@register
@dataclasses.dataclass(frozen=True)
class LargeValues(PromptScorer):
    """Keep the tokens whose values have the largest norm."""

    about: ClassVar[PolicyInfo] = PolicyInfo("large_values", summary="tokens with values of large norm", memory="freed")

    budget: int | float = 512

    def scores(self, spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B K T"]:
        return jnp.swapaxes(jnp.sum(prompt.v.astype(jnp.float32) ** 2, axis=-1), 1, 2)


def texts(params: kvjax.Params, prompt: str) -> list[str]:
    """What four ways of writing on give."""
    one: kvjax.Generation = kvjax.generate(params, prompt, policy="snapkv", budget=0.25, max_new_tokens=24)
    rows = kvjax.generate(params, [prompt, prompt], policy=LargeValues(budget=64), temperature=0.7, seed=1)
    pieces = list(kvjax.stream(params, prompt, policy=kvjax.TreeKV(budget=64), max_new_tokens=8))
    session = kvjax.Session(params, prompt, policy=SnapKV(budget=64))
    replies = session.ask(["Who speaks?"], max_new_tokens=8)
    print(f"{one.stats.cache_bytes / 1e6:.1f} of {one.stats.full_cache_bytes / 1e6:.1f} MB, {one.stop_reason}")
    return [
        text for text in (one.text, *(row.text for row in rows), "".join(pieces), replies[0].text) if text is not None
    ]


def chart(params: kvjax.Params, text: Path, folder: Path) -> None:
    """Three policies compared on a text, as a picture."""
    policies: list[Policy] = [kvjax.Full(), kvjax.StreamingLLM(), LargeValues()]
    cells = compare.compare(params, policies, (0.25, 0.5), ["perplexity"], Inputs(text=text), folder)
    print(compare.markdown(cells))
    found = evaluate(params, NeedleInAHaystack(lengths=(256,), depths=(0.5,)), kvjax.get_policy("h2o", budget=0.5))
    plots.save(plots.needle_map(found.rows, f"{found.score:.2f} found"), folder / "needles.png")


def main() -> None:
    (way, *_) = kvjax.plan("llama-3.1-8b", device="h100", context=32_768, policy="snapkv:4096")
    print(way.policy, way.peak_bytes, way.fits)
    params = kvjax.load(dtype="float32", progress=False)
    print(texts(params, "Call me Ishmael."))
    chart(params, Path("text.txt"), Path("results"))
    kvjax.save(params, "written", format="safetensors")


if __name__ == "__main__":
    main()
