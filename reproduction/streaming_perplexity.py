"""Perplexity of a long text streamed through a small cache, far past the trained window.

    python -m reproduction.streaming_perplexity --text BOOK.txt

For every policy the text is read token by token into an empty cache. `full` keeps everything, and is computed in one pass with the
same result. The table gives the perplexity of each part of the text, within and beyond the trained window. The default budget is TreeKV's setting (He et al. 2025, section 5.2): 1024
slots = 4 sinks + 512 tree + 508 recent.
"""

import time
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from kvjax.evals import Perplexity, streaming, windowed
from kvjax.policies.text import split_policies
from reproduction import models


def main() -> None:
    """Measure and print."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--text", type=Path, required=True, help="a plain text file, longer than --tokens")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policies", default="treekv,streaming_llm,full")
    parser.add_argument("--part", type=int, default=2048, help="tokens in each part of the table")
    parser.add_argument("--out", type=Path, default=Path("reproduction/results/streaming-perplexity.json"))
    args = parser.parse_args()

    params = kvjax.load(args.model, dtype=args.dtype)
    tokens = models.read_tokens(params, args.text, args.tokens)
    header = report.header(
        model=models.named(args.model),
        trained_window=params.config.context_length,
        text=args.text.name,
        tokens=args.tokens,
        budget=args.budget,
        dtype=args.dtype,
    )
    rows: list[dict[str, Any]] = []
    for name in split_policies(args.policies):
        start = time.perf_counter()
        result = measure(params, tokens, name, args.budget)
        row = {"policy": name, "perplexity": result.perplexity, "cache_bytes": result.cache_bytes}
        row["seconds"] = time.perf_counter() - start
        row["parts"] = parts = {
            f"{at}-{min(at + args.part, args.tokens)}": result.part(max(at - 1, 0), at + args.part - 1).perplexity
            for at in range(0, args.tokens, args.part)
        }
        rows.append(row)
        report.write(args.out, header, rows)
        shown = "  ".join(f"{part}: {value:.2f}" for part, value in parts.items())
        print(f"{name:16s} all {result.perplexity:9.2f}   {shown}", flush=True)


def measure(params: kvjax.Params, tokens: list[int], policy: str, budget: int) -> Perplexity:
    """Perplexity under one policy; the full cache in one pass."""
    if policy == "full":
        result = windowed(params, tokens, window=len(tokens))
        held = kvjax.get_policy("full").nbytes(params.config, 1, 0, len(tokens), params.dtype)
        return Perplexity(result.logprobs, held)
    return streaming(params, tokens, policy, budget)


if __name__ == "__main__":
    main()
