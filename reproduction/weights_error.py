"""Error of the logits with 8-bit and 4-bit weights, beside the same weights in float32.

    python -m reproduction.weights_error --model FOLDER --text BOOK.txt        # a checkpoint of your own
    python -m reproduction.weights_error --random smollm2-135m                 # random weights of a preset's shape
    python -m reproduction.weights_error --render                              # the section of docs/howto/weights.md

Each run adds the rows of one model to the result file.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import kvjax
from benchmarks import report
from kvjax.config import PRESETS
from kvjax.conversion import quantize_weights
from kvjax.models import Params, init, transformer
from reproduction import models
from reproduction.sections import Section

KINDS = "int8", "int4"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="any source that kvjax.load takes; by default the default model")
    parser.add_argument("--random", choices=sorted(PRESETS), help="random weights of this shape instead")
    parser.add_argument("--text", type=Path, default=models.BOOK, help="a plain text file")
    parser.add_argument("--length", type=int, default=512, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--render", action="store_true", help="write the page's section from the result file")
    args = parser.parse_args()
    if args.render:
        return SECTION.write()
    if args.random is None:
        name = models.named(args.model)
        params = kvjax.load(args.model, dtype="float32")
        tokens = models.read_tokens(params, args.text, args.length * args.passages)
    else:
        name = f"random weights, {args.random}"
        params = init(PRESETS[args.random], jax.random.key(0), "float32")
        tokens = np.random.default_rng(0).integers(0, params.config.vocab_size, args.length * args.passages).tolist()
    out = args.out or Path(f"reproduction/results/weights-error-{report.device_slug()}.json")
    settings = {"length": args.length, "passages": args.passages, "text": args.text.name}
    header, rows = report.begun(out, report.header(**settings))
    mine = measure(name, params, np.asarray(tokens, np.int32).reshape(args.passages, args.length))
    rows = [row for row in rows if row["model"] != name] + mine
    report.write(out, header, rows)
    print(table(mine))


def measure(name: str, params: Params, passages: np.ndarray) -> list[dict[str, Any]]:
    """Rows of the result file: what each passage's logits differ by."""
    rows = []
    for kind in tqdm(KINDS, unit="kind"):
        other = quantize_weights(params, kind)
        found = [jax.tree.map(float, _differences(params, other, passage[None])) for passage in passages]
        rows.append(
            {
                "model": name,
                "weights": kind,
                "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(other)),
                "float32_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
                **{key: [each[key] for each in found] for key in found[0]},
            }
        )
    return rows


@jax.jit
def _differences(params: Params, other: Params, tokens: Int[Array, "1 T"]) -> dict[str, Float[Array, ""]]:
    """What the logits after each token of a passage differ by.

    Returns:
        `error`: root mean square of the difference, relative to that of the logits, both without their mean over the vocabulary.
        `kl`: Kullback-Leibler divergence of the distributions, in nats. `same`: share of tokens with the same likeliest next token.
    """
    exact, near = (transformer.forward(each, tokens)[0].astype(jnp.float32) for each in (params, other))
    centred, moved = (x - jnp.mean(x, axis=-1, keepdims=True) for x in (exact, near))
    log_exact, log_near = jax.nn.log_softmax(exact), jax.nn.log_softmax(near)
    return {
        "error": jnp.sqrt(jnp.mean((moved - centred) ** 2) / jnp.mean(centred**2)),
        "kl": jnp.mean(jnp.sum(jnp.exp(log_exact) * (log_exact - log_near), axis=-1)),
        "same": jnp.mean((jnp.argmax(exact, -1) == jnp.argmax(near, -1)).astype(jnp.float32)),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each model and kind of weights."""
    lines = [
        [
            row["model"],
            f"`{row['weights']}`",
            f"{row['bytes'] / row['float32_bytes']:.2f}",
            f"{100 * np.mean(row['error']):.2f} %",
            f"{np.mean(row['kl']):.4f}",
            f"{100 * np.mean(row['same']):.1f} %",
        ]
        for row in rows
    ]
    heads = ["model", "weights", "of float32's bytes", "error of logits", "KL, nats", "same likeliest token"]
    return report.table(heads, lines, "llr")


def section(content: Mapping[str, Any]) -> str:
    """What the page has of a result file."""
    about, rows = content["header"]["settings"], content["rows"]
    first = rows[0]["model"]
    error = {row["weights"]: f"{100 * np.mean(row['error']):.1f} %" for row in rows if row["model"] == first}
    return (
        f"**The logits of {first} differ from those of its float32 weights by {error['int8']} with `int8`, and {error['int4']} with `int4`.** "
        f"{about['passages']} passages of {about['length']} tokens, in float32, embedding and head included. The passages are from "
        f"`{about['text']}`, and random tokens for random weights.\n\n"
        "- Error: root mean square of the difference, relative to that of the logits, both without their mean over the vocabulary.\n"
        "- KL: Kullback-Leibler divergence from the next token's distribution with float32 weights.\n\n"
        f"{table(rows)}\n\n"
        "This measures a checkpoint of your own, from a clone of the repository:\n\n"
        "```sh\npython -m reproduction.weights_error --model FOLDER --text BOOK.txt --out FILE\n```"
    )


SECTION = Section("howto/weights.md", "Error of the logits", "weights-error", section)


if __name__ == "__main__":
    main()
