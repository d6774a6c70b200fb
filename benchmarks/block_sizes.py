"""What reading a prompt in blocks costs in quality, by the size of the blocks and against the whole prompt.

    python -m benchmarks.block_sizes --text BOOK.txt --policies snapkv,treekv --blocks 512,2048,8192

For each policy and size of block: perplexity of the text that follows a prompt (`benchmarks.analyses.continuation`), and the share of
needles that are found in a haystack (`needle-number`). A block of 0 is the whole prompt. Policies that need it whole have that row alone.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import kvjax
from benchmarks import report
from benchmarks.analyses.continuation import continuation
from benchmarks.policy_quality import read
from kvjax.evals.measure import measure
from kvjax.evals.tasks import Inputs
from kvjax.policies.text import split_policies


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="a plain text file; may be repeated")
    parser.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    parser.add_argument("--prompt", type=int, default=7168, help="tokens of each text that are its prompt")
    parser.add_argument("--scored", type=int, default=1024, help="tokens read after them")
    parser.add_argument(
        "--needles", type=int, default=4, help="haystacks of so many tokens for each of 5 depths; 0: none"
    )
    parser.add_argument("--budget", type=float, default=0.25, help="a fraction of prompt + new tokens")
    parser.add_argument("--policies", default="full,streaming_llm,snapkv,chunkkv,h2o,tova,keydiff,treekv,chelsea")
    parser.add_argument("--blocks", default="512,2048,8192")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, so that some compile while others run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/block-sizes.json"))
    args = parser.parse_args()
    params = kvjax.load(args.model, dtype=args.dtype)
    texts = [read(params, path, 0, args.prompt + args.scored) for path in args.text]
    header = report.header(
        model=Path(args.model).name if args.model else "SmolLM2-135M-Instruct (the default model)",
        texts=[path.name for path in args.text],
        prompt_tokens=args.prompt,
        scored_tokens=args.scored,
        needles=args.needles,
        budget=args.budget,
        dtype=args.dtype,
    )
    sizes = [None, *(int(size) for size in args.blocks.split(","))]
    cases = [(text, size) for text in split_policies(args.policies) for size in sizes]
    rows: list[dict[str, Any]] = []

    def one(case: tuple[str, int | None]) -> dict[str, Any] | kvjax.PolicyError:
        try:
            return row(params, kvjax.get_policy(case[0], budget=args.budget), case[1], texts, args)
        except kvjax.PolicyError as error:
            return error

    with ThreadPoolExecutor(args.jobs) as pool:
        for found in tqdm(pool.map(one, cases), total=len(cases), unit="case"):
            if isinstance(found, kvjax.PolicyError):
                tqdm.write(str(found))
                continue
            rows.append(found)
            tqdm.write("{policy}, block {block}: perplexity {perplexity:.3f}, needles {needles}".format(**found))
            report.write(args.out, header, rows)


def row(
    params: kvjax.Params, policy: kvjax.Policy, block: int | None, texts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """A row of the result file. Perplexity is exp of the mean over all predicted tokens of all texts."""
    found = continuation(params, texts, args.prompt, policy, prefill_block=block)
    scores = np.concatenate([text.scores.logprobs for text in found])
    needles = None
    if args.needles:
        inputs = Inputs(text=args.text[0], lengths=(args.prompt,), samples=args.needles)
        needles = measure(params, "needle-number", inputs, policy, prefill_block=block).value
    return {
        "policy": policy.info.name,
        "block": block or 0,
        "perplexity": math.exp(-float(np.mean(scores, dtype=np.float64))),
        "needles": needles,
        "cache_bytes": found[0].scores.cache_bytes,
    }


if __name__ == "__main__":
    main()
