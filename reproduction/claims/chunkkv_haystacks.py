"""ChunkKV (Liu et al. 2025), its hybrid (section 4.6), by needles of several kinds in many haystacks; Figure 16 is judged in `chunkkv_needle`."""

from typing import get_args

from kvjax.evals import NeedleInAHaystack, Task
from kvjax.evals.needle import Kind
from kvjax.policies import ChunkKV, Policy, SnapKV, chunk_token_hybrid

from . import chunkkv_methods
from .bench import Bench, scored
from .claim import Claim, Measured

TITLE = "ChunkKV: needles of several kinds in many haystacks"

ABOUT = """\
Numbers, codes, pass keys and a sentence, each inserted at several depths of every book, question-aware. The hybrid keeps chunks in the lower half of the
layers and single tokens, by SnapKV, in the upper half."""

PLACE = "128 slots, all kinds of needles"

CLAIMS = (
    Claim(
        "Chunks in all layers are better than in the lower half alone",
        "Table 12, section 4.6",
        "the best on average (LongBench, LLaMA-3-8B-Instruct)",
        "LongBench",
        "needle accuracy",
        "chunkkv",
        ("chunkkv below snapkv",),
        PLACE,
    ),
)


def measure(bench: Bench) -> Measured:
    """A task for every kind and book."""
    length, depths, books = (512, 1, 1) if bench.small else (4096, 3, 6)
    spaced = (0.5,) if bench.small else (0.1, 0.5, 0.9)
    kinds: tuple[Kind, ...] = get_args(Kind)[:1] if bench.small else get_args(Kind)
    tasks: dict[str, Task] = {
        f"{kind} in book {i}": NeedleInAHaystack((length,), spaced, kind, text=book.read_text(encoding="utf-8"), seed=i)
        for i, book in enumerate(bench.books[:books], 1)
        for kind in kinds
    }
    chunks, tokens = ChunkKV(budget=128, window=32), SnapKV(budget=128, window=32)
    methods: dict[str, Policy] = {
        "chunkkv": chunks,
        **chunkkv_methods.others(128, 32),
        "chunkkv below snapkv": chunk_token_hybrid(bench.params.config.num_layers, chunks, tokens),
    }
    settings = {"kinds": ", ".join(kinds), "books": books, "depths": depths, "tokens": length}
    return Measured(settings, scored(bench, methods, tasks, "needle accuracy", PLACE, batch=depths))
