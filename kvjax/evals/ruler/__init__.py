"""RULER (Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?"): 13 synthetic tasks.

Implemented from the paper's description, with its published prompts. Examples are drawn for every seed, at any length.
"""

from .base import RulerTask as RulerTask
from .counting import CommonWords as CommonWords
from .counting import FrequentWords as FrequentWords
from .niah import SETTINGS as _SETTINGS
from .niah import Niah as Niah
from .qa import QuestionAnswering as QuestionAnswering
from .tracking import VariableTracking as VariableTracking

TASKS = (*_SETTINGS, "vt", "cwe", "fwe", "qa_1", "qa_2")
"""RULER's task names."""


def ruler(
    name: str, length: int, samples: int, seed: int = 0, text: str | None = None, file: str | None = None
) -> RulerTask:
    """One of the 13 tasks by name.

    Args:
        length: tokens of prompt and answer.
        samples: examples to draw.
        text: haystack of the tasks that hide needles in a text.
        file: questions of qa_1 (SQuAD 2) and qa_2 (HotpotQA).

    Raises:
        ValueError: the name is unknown, or the task needs a text or file that is not given.
    """
    shared = {"length": length, "samples": samples, "seed": seed}
    if name in _SETTINGS:
        return Niah(**shared, task=name, text=text if _SETTINGS[name].hay == "text" else None)
    if name in ("qa_1", "qa_2"):
        task = QuestionAnswering(**shared, file=file or "")
        if task.name != name:
            raise ValueError(f"{file} makes {task.name}, not {name}; qa_1 takes SQuAD's form, qa_2 HotpotQA's")
        return task
    others: dict[str, type[RulerTask]] = {"vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
    if name not in others:
        raise ValueError(f"unknown RULER task {name!r}; there are {', '.join(TASKS)}")
    return others[name](**shared)
