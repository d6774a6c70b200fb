"""Distillation towards the full cache: two updates of a small model, and the page's section of a result file."""

from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from benchmarks import report
from reproduction import distillation, sections

SIZES = distillation.Sizes(rows=2, prompt=24, steps=4)


@pytest.fixture(scope="module")
def passages() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (SIZES.rows, SIZES.passage), dtype=np.int32)


@pytest.fixture(scope="module")
def row(tiny, passages):
    """Two updates on the same passages, which are held out as well."""
    train, held = np.stack([passages] * 2), passages[None]
    with jax.numpy_dtype_promotion("standard"):  # of optax
        return distillation.distil(tiny, "streaming_llm:12", train, held, SIZES, 1e-2, 2)


def test_two_updates_bring_a_small_cache_nearer_to_the_full_one(row):
    assert row["losses"][1] < row["losses"][0]
    assert all(after < before for before, after in zip(row["before"], row["after"], strict=True))


def test_divergences_are_those_of_the_logits(row, tiny, passages):
    """KL(full || small) in NumPy, from logits of the two caches. Untrained factors change nothing."""
    prompts, following = passages[:, : SIZES.prompt], passages[:, SIZES.prompt :]
    options: dict[str, Any] = {"batch": SIZES.rows, "prompt_len": SIZES.prompt, "max_new_tokens": SIZES.steps}
    logprobs = []
    for policy in ("full", "streaming_llm:12"):
        logits = kvjax.Engine(tiny, policy, **options).logits(tiny, prompts, np.full(2, SIZES.prompt), following)
        wide = np.asarray(logits, np.float64)
        logprobs.append(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
    want = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[1])).sum(-1).mean(-1)
    np.testing.assert_allclose(row["before"], want, rtol=1e-4)
    np.testing.assert_allclose(row["losses"][0], want.mean(), rtol=1e-4)


def test_only_norms_and_factors_are_trained(tiny):
    trained = distillation.begin(tiny, 2, jax.random.key(0))
    changed = distillation.adapted(tiny, jax.tree.map(lambda leaf: leaf + 1, trained))
    found = {
        jax.tree_util.keystr(path)
        for path, same in jax.tree.leaves_with_path(jax.tree.map(np.array_equal, tiny, changed))
        if not same
    }
    wanted = {
        f".layers[{i}].{name}"
        for i in range(len(tiny.layers))
        for name in ("attn.q", "attn.k", "attn.v", "attn.o", "attn_norm", "mlp_norm")
    }
    assert found == wanted | {".norm"}


def test_the_page_has_the_section_of_a_result_file(row, tmp_path, monkeypatch):
    settings = {
        "model": "small",
        "policy": "treekv:64",
        "updates": 2,
        "rows": 4,
        "prompt": 256,
        "steps": 32,
        "rank": 8,
        "cores": 2,
    }
    row = row | {"before": [2.0, 4.0], "after": [1.0, 2.0], "seconds": 600.0, "cpu_seconds": 1200.0}
    monkeypatch.setattr(sections, "RESULTS", tmp_path)
    report.write(tmp_path / "distillation-cpu.json", {"settings": settings, "device": "1 x cpu (cpu)"}, [row])
    file = distillation.SECTION.file()
    assert file is not None
    section = distillation.SECTION.of(file)
    assert "by -50 %" in section
    assert "took 20 minutes of processor time after compiling, 10 minutes in all on 2 CPU cores" in section
    assert "| 2 held out | 3.0000 | 1.5000 | -1.5000 ± 6.3531 |" in section  # 0.5 * 12.7062, of Student's t


def test_the_section_is_that_of_the_result_file():
    page = (sections.DOCS / distillation.SECTION.page).read_text(encoding="utf-8")
    file = distillation.SECTION.file()
    assert (f"## {distillation.SECTION.title}\n" in page) is (file is not None)
    assert file is None or distillation.SECTION.of(file) in page
