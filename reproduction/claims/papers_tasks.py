"""The papers' own tasks whose data are available: three of LongBench, GSM8K, and the tasks of RULER that need no file."""

import numpy as np
from jaxtyping import Int

from kvjax.evals import GSM8K, Format, LongBench, Task
from kvjax.evals.longbench import tasks as longbench_tasks
from kvjax.evals.ruler import VariableTracking, ruler

from .bench import Bench

LONGBENCH = ("multifieldqa_zh", "passage_retrieval_zh", "multi_news")
"""The available tasks of LongBench; the first two are Chinese."""


def longbench(bench: Bench, names: tuple[str, ...] = LONGBENCH) -> dict[str, Task]:
    """LongBench's tasks with prompts truncated to 8k tokens; at small sizes only the first task."""
    length, samples = (640, 2) if bench.small else (8192, 20)
    return {
        name: LongBench(
            name,
            str(bench.data / "longbench" / f"{name}.jsonl"),
            max_length=length - 64 - min(longbench_tasks()[name]["max_new_tokens"], length // 2),
            samples=samples,
        )
        for name in (names[:1] if bench.small else names)
    }


def gsm8k(bench: Bench) -> dict[str, Task]:
    """GSM8K after eight solved examples."""
    files = (str(bench.data / "gsm8k" / name) for name in ("test.jsonl", "train_first600.jsonl"))
    shots, samples = (1, 2) if bench.small else (8, 64)
    return {"gsm8k": GSM8K(*files, shots=shots, samples=samples)}


def tracking(bench: Bench, length: int) -> dict[str, Task]:
    """RULER's needles, variable tracking and frequent words at a length."""
    samples = 2 if bench.small else 20
    names = ("niah_single_1",) if bench.small else ("niah_single_1", "niah_multikey_1", "niah_multivalue", "vt", "fwe")
    text = bench.books[0].read_text(encoding="utf-8")
    return {name: ruler(name, length, samples, text=text) for name in names}


def calibration(bench: Bench, length: int) -> Int[np.ndarray, "N S"]:
    """Prompts of RULER's variable tracking at a length, all cut to the shortest; other prompts than those of `tracking`.

    CateKV classifies heads on such prompts by the attention of their last tokens (Jiang et al. 2025, section 4.1).
    """
    assert bench.params.tokenizer is not None
    form = Format(bench.params.tokenizer, bench.params.tokenizer.chat_template is not None)
    task = VariableTracking(length, samples=2 if bench.small else 4, seed=1)
    prompts = [[*context, *question] for context, question in map(form.encode, task.examples(form))]
    size = min(map(len, prompts))
    return np.asarray([prompt[-size:] for prompt in prompts], np.int32)
