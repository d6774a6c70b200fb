"""Distil a model with a small cache towards its own full cache; on a CPU, sixty updates of the default model take ten to twenty minutes.

    python -m reproduction.distillation --text BOOK.txt --heldout OTHER.txt

A passage is a prompt and the tokens that follow it. Prefill compresses the prompt, and each following token is a decode step. Norms are trained, and
low-rank factors that are added to the projections of attention. All other weights stay as they are. The result file has the KL divergence
from the full cache of every update, and that of every held-out passage before and after. `--render` writes the section of docs/howto/training.md.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import kvjax
from benchmarks import report
from kvjax.evals.intervals import mean_interval
from reproduction import models
from reproduction.sections import Section

PROJECTIONS = "q", "k", "v", "o"
"""Matrices that low-rank factors are added to."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an update: passages, tokens of a prompt, and tokens that follow it."""

    rows: int = 4
    prompt: int = 256
    steps: int = 32

    @property
    def passage(self) -> int:
        """Tokens of a passage."""
        return self.prompt + self.steps


def main() -> None:
    """Train and print."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--text", type=Path, help="a plain text file to train on")
    parser.add_argument("--heldout", type=Path, help="another one, for the divergence before and after")
    parser.add_argument("--policy", default="treekv:64", help="of the student (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="learning rate, which decays to 0 (default: %(default)s)"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the factors (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=32, help="held out, a multiple of 4 (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--render", action="store_true", help="write the page's section from the result file")
    args = parser.parse_args()
    if args.render:
        return SECTION.write()
    if args.text is None or args.heldout is None:
        parser.error("give --text and --heldout")
    sizes = Sizes()
    if args.passages % sizes.rows:
        parser.error(f"--passages {args.passages} is no multiple of {sizes.rows}")
    out = args.out or Path(f"reproduction/results/distillation-{report.device_slug()}.json")
    params = kvjax.load(args.model, dtype=args.dtype)
    train, held = (
        np.asarray(models.read_tokens(params, path, count * sizes.passage), np.int32).reshape(
            -1, sizes.rows, sizes.passage
        )
        for path, count in ((args.text, args.updates * sizes.rows), (args.heldout, args.passages))
    )
    header = report.header(
        model=models.named(args.model),
        text=args.text.name,
        heldout=args.heldout.name,
        policy=args.policy,
        cores=os.cpu_count(),
        **{name: getattr(args, name) for name in ("updates", "rate", "rank", "passages", "dtype")},
        **vars(sizes),
    )
    row = distil(params, args.policy, train, held, sizes, args.rate, args.rank)
    report.write(out, header, [row])
    print(text(report.read(out)))


def distil(
    params: kvjax.Params, policy: str, train: np.ndarray, held: np.ndarray, sizes: Sizes, rate: float, rank: int
) -> dict[str, Any]:
    """Train, and return the row of the result file.

    Args:
        params: the model.
        policy: of the student's cache.
        train: the passages of each update, `[updates, rows, passage]`.
        held: held-out passages, `[batches, rows, passage]`.
        sizes: of an update.
        rate: learning rate.
        rank: of the factors.
    """
    divergence = between(params, policy, sizes)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, len(train)))

    @jax.jit
    def update(params: kvjax.Params, trained: Any, state: Any, passages: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(trained: Any) -> jax.Array:
            return divergence(params, adapted(params, trained), passages).mean()

        value, gradient = jax.value_and_grad(loss)(trained)
        changes, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, changes), state, value

    @jax.jit
    def measured(params: kvjax.Params, trained: Any, passages: jax.Array) -> jax.Array:
        return divergence(params, adapted(params, trained), passages)

    def heldout(trained: Any) -> list[float]:
        return [float(each) for batch in tqdm(held, desc="held out") for each in measured(params, trained, batch)]

    trained = begin(params, rank, jax.random.key(0))
    state, losses = optimizer.init(trained), []
    before = heldout(trained)
    compiled = update.lower(params, trained, state, train[0]).compile()
    wall, cpu = time.perf_counter(), time.process_time()
    for passages in tqdm(train, desc="train"):
        trained, state, value = compiled(params, trained, state, passages)
        losses.append(float(value))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "losses": losses,
        "before": before,
        "after": heldout(trained),
        "trained": sum(leaf.size for leaf in jax.tree.leaves(trained)),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "seconds": wall,
        "cpu_seconds": cpu,
    }


def between(
    params: kvjax.Params, policy: str, sizes: Sizes
) -> Callable[[kvjax.Params, kvjax.Params, jax.Array], jax.Array]:
    """The KL divergence of a changed model with a policy's cache from the model with the full cache, of each passage, mean over its steps, in nats."""
    options: dict[str, Any] = {"batch": sizes.rows, "prompt_len": sizes.prompt, "max_new_tokens": sizes.steps}
    teacher, student = (kvjax.Engine(params, name, **options) for name in ("full", policy))
    lengths = np.full(sizes.rows, sizes.prompt, np.int32)

    def divergence(params: kvjax.Params, changed: kvjax.Params, passages: jax.Array) -> jax.Array:
        given = passages[:, : sizes.prompt], lengths, passages[:, sizes.prompt :]
        wanted = jax.lax.stop_gradient(jax.nn.log_softmax(teacher.logits(params, *given)))
        found = jax.nn.log_softmax(student.logits(changed, *given))
        return jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1).mean(axis=-1)

    return divergence


def begin(params: kvjax.Params, rank: int, key: jax.Array) -> Any:
    """The trained arrays at the beginning, with which the model is unchanged: its norms, and factors `[rank, in]` and `[out, rank]`, the latter zero."""

    def factors(key: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, size = matrix.shape
        return jax.random.normal(key, (rank, size)) / size**0.5, jnp.zeros((out, rank))

    layers = []
    for layer, each in zip(params.layers, jax.random.split(key, len(params.layers)), strict=True):
        keys = jax.random.split(each, len(PROJECTIONS))
        made = {name: factors(one, getattr(layer.attn, name)) for name, one in zip(PROJECTIONS, keys, strict=True)}
        layers.append({"attn_norm": layer.attn_norm, "mlp_norm": layer.mlp_norm, "factors": made})
    return {"layers": layers, "norm": params.norm}


def adapted(params: kvjax.Params, trained: Any) -> kvjax.Params:
    """The model with the trained arrays."""
    layers = []
    for layer, changed in zip(params.layers, trained["layers"], strict=True):
        projections = {name: getattr(layer.attn, name) + up @ down for name, (down, up) in changed["factors"].items()}
        norms = {name: changed[name] for name in ("attn_norm", "mlp_norm")}
        layers.append(dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, **projections), **norms))
    return dataclasses.replace(params, layers=tuple(layers), norm=trained["norm"])


def text(content: Mapping[str, Any]) -> str:
    """What the page has of a result file."""
    header, (row,) = content["header"], content["rows"]
    about = header["settings"]
    before, after = np.mean(row["before"]), np.mean(row["after"])
    change, half = mean_interval(np.subtract(row["after"], row["before"]))
    table = report.table(
        ["passages", "KL divergence before", "after", "change"],
        [[f"{len(row['before'])} held out", f"{before:.4f}", f"{after:.4f}", f"{change:+.4f} ± {half:.4f}"]],
    )
    return (
        f"**{about['updates']} updates changed the KL divergence of {models.title(about)} with `{about['policy']}` from its full cache by "
        f"{100 * (after / before - 1):+.0f} %, on passages of a book that it was not trained on.** "
        f"They took {row['cpu_seconds'] / 60:.0f} minutes of processor time after compiling, {row['seconds'] / 60:.0f} minutes in all on "
        f"{about['cores']} CPU cores:\n\n"
        f"{table}\n\n"
        f"- An update has {about['rows']} passages of {about['prompt']} prompt tokens and {about['steps']} scored tokens.\n"
        f"- Trained are norms, and factors of rank {about['rank']} on the projections of attention: {row['trained'] / 1e6:.1f} million of "
        f"{row['parameters'] / 1e6:.0f} million numbers.\n"
        f"- Divergences are in nats per token. The change is the mean of paired differences with its 95 % interval.\n\n"
        "Measured by `python -m reproduction.distillation`."
    )


SECTION = Section("howto/training.md", "An example: the default model on a CPU", "distillation", text)


if __name__ == "__main__":
    main()
