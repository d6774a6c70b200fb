"""What of Chelsea costs what: sizes of its clusters, what attention they get, how keys shrink, and what that does to outputs and text.

    python -m reproduction.analyses.chelsea_clusters --model MODEL     # writes reproduction/results/chelsea-clusters-<model>-<device>.json
    python -m reproduction.analyses.chelsea_clusters --prompt 1024 --scored 64 --texts 1 --out small.json      # for a CPU

For every variant of `VARIANTS` and every text: keys and values of the text's beginning, as the plain model has them, are clustered, and
the queries after it attend to the clusters. Outputs are compared with those of full attention; then the text is read on through the
cache, and what its tokens lose in log-probability over the full cache is told. What is measured is kept, and a run that was cut short goes on.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from benchmarks import report
from kvjax.analysis.recording import Recorded, record
from kvjax.cache import LayerSpec, PromptKV, layer_specs
from kvjax.evals.report import ResultFile, model_fingerprint
from kvjax.policies import Chelsea, Full, Policy, prompt_only
from reproduction import models
from reproduction.analyses.continuation import continuation
from reproduction.sections import RESULTS

SIZES = (1, 2, 8, 64)
"""Clusters are told apart by the least size that they have of these."""

VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "half of the budget recent": {"recent": 0.5},
    "matched before rotation": {"match": "unrotated"},
    "matched and merged before rotation": {"match": "unrotated", "merge": "unrotated"},
    "the same, half of the budget recent": {"match": "unrotated", "merge": "unrotated", "recent": 0.5},
    "matched by positions": {"match": "positions"},
    "divided into halves": {"partition": "halves"},
    "divided at random": {"partition": "random"},
}
"""Options of Chelsea by the names that results have."""

STOPPED = "the paper's, not merged in decoding"
"""What is kept of the prompt by the paper's, and every new token."""


def main() -> None:
    """Measure what is not there yet, and write the result file."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--folder", type=Path, default=models.SHARED / "text/books", help="folder of texts, *.txt")
    parser.add_argument("--texts", type=int, default=4, help="how many are read")
    parser.add_argument("--prompt", type=int, default=7168, help="tokens that are clustered")
    parser.add_argument("--scored", type=int, default=512, help="tokens after them")
    parser.add_argument("--budget", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing after so long; the next run goes on")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    end = None if args.seconds is None else time.monotonic() + args.seconds
    params = kvjax.load(args.model, dtype=args.dtype)
    model = Path(args.model).stem if args.model else "smollm2-135m"
    out = args.out or RESULTS / f"chelsea-clusters-{model.lower()}-{report.device_slug()}.json"
    books = sorted(args.folder.glob("*.txt"))[: args.texts]
    about = {name: getattr(args, name) for name in ("dtype", "prompt", "scored", "budget")}
    about["books"] = [book.name for book in books]
    header = report.header(model=model, fingerprint=model_fingerprint(params), **about)
    kept = ResultFile(out.with_suffix(".jsonl"), header)
    done = {(row["variant"], row["book"]) for row in kept.rows}
    for book in books:
        text, layers = models.read_tokens(params, book, args.prompt + args.scored), None
        for name, policy in policies(args.budget).items():
            if (name, book.name) in done:
                continue
            if end is not None and time.monotonic() > end:
                print("out of time; run it again", flush=True)
                return
            row = {"variant": name, "book": book.name, "nll": loss(params, text, args.prompt, policy)}
            if name in VARIANTS:
                layers = record(params, text) if layers is None else layers
                specs = layer_specs(params.config, 1, args.prompt, args.scored, jnp.float32)
                row |= averaged([clusters(policy, *each, args.prompt) for each in zip(specs, layers, strict=True)])
            kept.append([row])
            print(line(row), flush=True)
    report.write(out, header, kept.rows)
    out.with_suffix(".jsonl").unlink()
    print(f"wrote {out}")


def policies(budget: float) -> dict[str, Policy]:
    """All that is compared; heads are all clustered."""
    paper = Chelsea(budget=budget, outliers=False)
    found: dict[str, Policy] = {name: dataclasses.replace(paper, **options) for name, options in VARIANTS.items()}
    return {"full": Full(), **found, STOPPED: prompt_only(paper)}


def loss(params: kvjax.Params, text: Sequence[int], prompt: int, policy: Policy) -> float:
    """Nats for each token that follows the prompt."""
    (found,) = continuation(params, [text], prompt, policy)
    return found.scores.nll


def clusters(policy: Policy, spec: LayerSpec, layer: Recorded, prompt: int) -> dict[str, Any]:
    """What one layer's clusters are like; means over heads, and over the queries after the prompt.

    Returns:
        By size (of `SIZES`): shares of the "slots", of the "tokens" and of the "attention" that all slots get. "shrink": how much
        shorter a centroid's key is than the keys it is the mean of, over tokens in clusters of two and more. "error": of outputs, their
        distance from those of full attention over these outputs' length. "error, keys at full length": the same where
        centroids are as long as their keys.
    """
    q, k, v = (jnp.asarray(x)[None] for x in layer[:3])
    lengths = jnp.asarray([k[:, :prompt].shape[1]], jnp.int32)
    norms = jnp.broadcast_to(jnp.linalg.norm(k, axis=-1, keepdims=True), v.shape)
    cache, of_norms = (
        _clustered(policy, spec, q[:, :prompt], k[:, :prompt], x[:, :prompt], lengths) for x in (v, norms)
    )
    weight, size = cache.weight[0], jnp.linalg.norm(cache.k[0], axis=-1)
    length = of_norms.v[0, :, :, 0]
    live = weight > 0
    later = [jnp.swapaxes(x[0, prompt:], 0, 1) for x in (k, v)]
    queries = jnp.swapaxes(
        q[0, prompt:].reshape(-1, spec.num_kv_heads, q.shape[2] // spec.num_kv_heads, q.shape[3]), 0, 1
    )

    everything = [jnp.swapaxes(x[0, :prompt], 0, 1) for x in (k, v)]
    exact, _ = _attended(spec, queries, *everything, jnp.ones(everything[0].shape[:2]), *later)
    found, mass = _attended(spec, queries, cache.k[0], cache.v[0], weight, *later)
    longer = cache.k[0] * jnp.where(live, length / jnp.maximum(size, 1e-9), 1.0)[..., None]
    restored, _ = _attended(spec, queries, longer, cache.v[0], weight, *later)

    many = jnp.where(weight > 1, weight, 0.0)
    shrink = 1 - jnp.sum(many * size / jnp.maximum(length, 1e-9)) / jnp.maximum(jnp.sum(many), 1.0)
    bins = [(weight >= low) & (weight < high) for low, high in zip(SIZES, (*SIZES[1:], np.inf), strict=True)]

    def shares(of: Array) -> list[float]:
        return [float(jnp.sum(jnp.where(each, of, 0)) / jnp.sum(jnp.where(live, of, 0))) for each in bins]

    def error(out: Array) -> float:
        return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))

    return {
        "slots": shares(jnp.ones_like(weight)),
        "tokens": shares(weight),
        "attention": shares(mass),
        "shrink": float(shrink) if jnp.any(many > 0) else 0.0,
        "error": error(found),
        "error, keys at full length": error(restored),
    }


@partial(jax.jit, static_argnums=(0, 1))
def _clustered(policy: Policy, spec: LayerSpec, q: Array, k: Array, v: Array, lengths: Array) -> Any:
    """What is kept of a prompt with rotated queries and keys."""
    padding = [(0, 0), (0, spec.prompt_len - k.shape[1]), (0, 0), (0, 0)]
    q, k, v = (jnp.pad(x, padding) for x in (q, k, v))
    places = jnp.arange(spec.prompt_len, dtype=jnp.int32)
    pos = jnp.where(places < lengths[:, None], places, -1)[:, None]
    prompt = PromptKV(q, k, v, q, k, pos, lengths, lengths, lengths + spec.new_tokens)
    return policy.layer(spec).prefill(prompt, {})[0].cache


@partial(jax.jit, static_argnums=0)
def _attended(
    spec: LayerSpec,
    queries: Float[Array, "K S G H"],
    k: Float[Array, "K C H"],
    v: Float[Array, "K C H"],
    weight: Float[Array, "K C"],
    later_k: Float[Array, "K S H"],
    later_v: Float[Array, "K S H"],
) -> tuple[Float[Array, "K S G H"], Float[Array, "K C"]]:
    """Outputs of queries over slots that count `weight` times, and over those that came after them; and what each slot got."""
    count = k.shape[1]
    logits = jnp.einsum("ksgh,kch->ksgc", queries, jnp.concatenate([k, later_k], axis=1)) * spec.scale
    steps = jnp.arange(later_k.shape[1], dtype=jnp.int32)
    bias = jnp.where(weight > 0, jnp.log(jnp.maximum(weight, 1e-9)), -jnp.inf)[:, None]
    causal = jnp.where(steps <= steps[:, None], 0.0, -jnp.inf)
    logits += jnp.concatenate(
        [
            jnp.broadcast_to(bias, (*bias.shape[:1], len(steps), count)),
            jnp.broadcast_to(causal, (len(bias), *causal.shape)),
        ],
        axis=-1,
    )[:, :, None]
    probs = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("ksgc,kch->ksgh", probs, jnp.concatenate([v, later_v], axis=1)), jnp.sum(
        probs[..., :count], (1, 2)
    )


def averaged(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over layers."""
    return {name: np.mean([layer[name] for layer in layers], axis=0).tolist() for name in layers[0]}


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    about = ""
    if "slots" in row:
        shares = (
            f"{name} {'/'.join(f'{100 * share:.0f}' for share in row[name])} %"
            for name in ("slots", "tokens", "attention")
        )
        about = f"{', '.join(shares)}, shrink {row['shrink']:.3f}, error {row['error']:.3f} ({row['error, keys at full length']:.3f})"
    return f"{row['variant']:40s} {row['book'][:24]:24s} nll {row['nll']:.3f}  {about}"


if __name__ == "__main__":
    main()
