"""RULER (Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?"): 13 tasks.

Written from the paper's description, with its published prompts. Examples are drawn from a seed, at any length.
"""

from .base import RulerTask as RulerTask
from .counting import CommonWords as CommonWords
from .counting import FrequentWords as FrequentWords
from .niah import SETTINGS as _SETTINGS
from .niah import Niah as Niah
from .qa import QuestionAnswering as QuestionAnswering
from .tracking import VariableTracking as VariableTracking

TASKS = (*_SETTINGS, "vt", "cwe", "fwe", "qa_1", "qa_2")
"""Names of RULER's tasks."""


def ruler(
    name: str, length: int, samples: int, seed: int = 0, text: str | None = None, file: str | None = None
) -> RulerTask:
    """Return one of the 13 tasks by name.

    Args:
        name: RULER's name of the task.
        length: tokens of prompt and answer.
        samples: number of examples.
        seed: of all draws.
        text: haystack, for tasks that hide needles in a text.
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
            raise ValueError(f"{file} is for {task.name}, not {name}. Give SQuAD's form for qa_1, HotpotQA's for qa_2.")
        return task
    others: dict[str, type[RulerTask]] = {"vt": VariableTracking, "cwe": CommonWords, "fwe": FrequentWords}
    if name not in others:
        raise ValueError(f"unknown RULER task {name!r}. Give one of {', '.join(TASKS)}.")
    return others[name](**shared)
