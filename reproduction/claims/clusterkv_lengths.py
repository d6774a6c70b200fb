"""ClusterKV (Liu et al. 2024), Figure 11a, at 16k and 32k tokens with the paper's number of clusters, C0 = L / 80."""

import dataclasses
from functools import partial

from kvjax.analysis.recording import record
from kvjax.policies import ClusterKV, InfiniGen, Quest

from . import clusterkv_recall
from .bench import Bench
from .claim import Claim, Measured, Row

TITLE = "ClusterKV: recall in long texts"

ABOUT = """\
Recall of important tokens, measured as in the section of that name, in texts of 16k and 32k tokens. The paper uses 32k. There is one cluster for each
80 tokens. Beyond the trained window the queries are extrapolation."""

LENGTHS = (16384, 32768)
BUDGETS = (256, 1024)
SETTING = "one text of NarrativeQA, 32k tokens"


def place(budget: int, length: int) -> str:
    """What rows call a budget in texts of a length."""
    return f"{length} tokens, budget {budget}"


CLAIMS = tuple(
    Claim(
        f"At {length} tokens and a budget of {budget} it recalls more than Quest and InfiniGen",
        f"Figure 11a, {length} tokens",
        "a figure: higher at all budgets",
        "recall",
        "recall of important tokens",
        "clusterkv",
        ("quest", "infinigen"),
        place(budget, length),
        bounds=("infinigen",),
        setting=SETTING,
    )
    for length in LENGTHS
    for budget in BUDGETS
)


def measure(bench: Bench) -> Measured:
    """One book at a time is recorded at its full length, and replayed to every method at every budget."""
    steps, books, lengths, budgets = (8, 2, (256, 384), (48, 96)) if bench.small else (16, 4, LENGTHS, BUDGETS)
    methods = {"clusterkv": ClusterKV(tokens_per_cluster=80), "quest": Quest(), "infinigen": InfiniGen(alpha=1e9)}
    every = max(1, bench.params.config.num_layers // 4)
    layers = range(min(2, every), bench.params.config.num_layers, every)
    found: dict[tuple[str, str], list[float]] = {}
    for length in lengths:
        for i, text in enumerate(bench.pieces(books, length, 0), 1):
            names = {
                f"{name}, {budget}": dataclasses.replace(policy, budget=budget)
                for name, policy in methods.items()
                for budget in budgets
            }
            of = f"{length} tokens of book {i}: "
            if all(of + name in bench.kept for name in names):  # a whole text of this length takes long to record
                read = []
            else:
                recorded = record(bench.params, text)
                read = [recorded[layer] for layer in layers]
            jobs = {
                name: partial(clusterkv_recall.rate, policy, read, length - steps) for name, policy in names.items()
            }
            for job, value in bench.each(jobs, of).items():
                name, _, budget = job.rpartition(", ")
                found.setdefault((name, place(int(budget), length)), []).append(value)
    settings = {"books": books, "queries": steps, "layers": ", ".join(map(str, layers))}
    return Measured(
        settings, [Row("recall of important tokens", name, at, rates) for (name, at), rates in found.items()]
    )
