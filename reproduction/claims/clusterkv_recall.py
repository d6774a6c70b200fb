"""ClusterKV (Liu et al. 2024), Figure 11: whether what a query selects are the tokens that it would attend to most."""

import dataclasses
import itertools
from functools import partial

import numpy as np

from kvjax.analysis.recall import recall_rate, replay
from kvjax.analysis.recording import Recorded, record
from kvjax.policies import ClusterKV, InfiniGen, Quest

from .bench import Bench
from .claim import Claim, Measured, Row

TITLE = "ClusterKV: recall of important tokens"

ABOUT = """\
Recall: the share of a query's selected tokens that are among the same number of tokens with the largest attention weights, averaged over query heads,
steps and four layers. The queries are those of the uncompressed model on books, so all methods get the same queries. InfiniGen gets the layer's
own queries instead of predicting them from the layer before, and selects as many tokens as the others. Its numbers are therefore an upper bound.
Its projection comes from the prompt's queries. InfiniGen selects per KV head, the others per query head."""

BUDGETS = (256, 512, 1024, 2048)
PER_CLUSTER = (320, 160, 80, 40)
"""Tokens to a cluster: L / C0, where L / 80 is the paper's choice."""

SWEPT = 1024
"""The budget at which numbers of clusters are compared."""

SETTING = "one text of NarrativeQA, 32k tokens"


def sized(tokens: int) -> str:
    """The name in rows of ClusterKV with clusters of `tokens` tokens."""
    return "clusterkv" if tokens == 80 else f"clusterkv, C0 = L/{tokens}"


claim = partial(Claim, own="recall", measure="recall of important tokens", setting=SETTING)

CLAIMS = (
    *(
        claim(
            f"At a budget of {budget} it recalls more than Quest and InfiniGen",
            "Figure 11a",
            "a figure: higher at all budgets",
            method="clusterkv",
            others=("quest", "infinigen"),
            at=f"budget {budget}",
            bounds=("infinigen",),
        )
        for budget in BUDGETS
    ),
    *(
        claim(
            f"At a budget of {budget} clustering by cosine similarity recalls more than by L2 distance and by inner product",
            "Figure 11b",
            "a figure: cosine above both",
            method="clusterkv",
            others=("clusterkv, L2", "clusterkv, inner product"),
            at=f"budget {budget}",
        )
        for budget in BUDGETS
    ),
    *(
        claim(
            f"C0 = L/{more} recalls more than L/{fewer}",
            "section V-B",
            "recall improves with C0, less so above L/80",
            method=sized(more),
            others=(sized(fewer),),
            at=f"budget {SWEPT}",
        )
        for fewer, more in itertools.pairwise(PER_CLUSTER)
    ),
)


def measure(bench: Bench) -> Measured:
    """One book at a time is recorded, and replayed to every method at every budget."""
    prompt, steps, books, budgets = (352, 8, 2, (48, 96)) if bench.small else (8160, 32, 6, BUDGETS)
    methods = {
        "clusterkv": ClusterKV(),
        "clusterkv, L2": ClusterKV(distance="l2"),
        "clusterkv, inner product": ClusterKV(distance="ip"),
        "quest": Quest(),
        "infinigen": InfiniGen(alpha=1e9),
    }
    cases = {
        (name, budget): dataclasses.replace(policy, budget=budget)
        for name, policy in methods.items()
        for budget in budgets
    }
    cases |= {
        (sized(tokens), budgets[-1] if bench.small else SWEPT): ClusterKV(
            budget=budgets[-1] if bench.small else SWEPT, tokens_per_cluster=tokens
        )
        for tokens in PER_CLUSTER
    }
    every = max(1, bench.params.config.num_layers // 4)
    layers = range(min(2, every), bench.params.config.num_layers, every)
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for i, text in enumerate(bench.pieces(books, prompt + steps, 0 if bench.small else 4096), 1):
        recorded = record(bench.params, text)
        read = [recorded[i] for i in layers]
        jobs = {f"{name}, {budget}": partial(rate, cases[name, budget], read, prompt) for name, budget in cases}
        for case, value in zip(cases, bench.each(jobs, f"book {i}: ").values(), strict=True):
            found[case].append(value)
    settings = {"books": books, "prompt": prompt, "queries": steps, "layers": ", ".join(map(str, layers))}
    return Measured(
        settings,
        [Row("recall of important tokens", name, f"budget {budget}", rates) for (name, budget), rates in found.items()],
    )


def rate(policy: ClusterKV | Quest | InfiniGen, layers: list[Recorded], prompt: int) -> float:
    """Mean over layers, heads and steps."""
    return float(np.mean([recall_rate(*replay(policy, layer, prompt)) for layer in layers]))
