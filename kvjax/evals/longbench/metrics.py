"""LongBench's metrics (Bai et al. 2023, Table 1), as its published scorer computes them: from 0 to 1, one reference at a time.

As in LongBench, ROUGE-L comes from the `rouge` package and Chinese words from jieba. Edit similarity is fuzzywuzzy's in pure Python:
difflib's, rounded to whole percents. With python-Levenshtein installed, fuzzywuzzy gives other values.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvjax._util.extras import optional

_CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."


def check(metric: str) -> None:
    """Raise ImportError if a package that a metric needs is not installed."""
    if metric.startswith("rouge"):
        _rouge()
    if metric in ("f1_zh", "rouge_l_zh"):
        _jieba()


def f1(answer: str, reference: str) -> float:
    """F1 of the words in common, without case, punctuation and articles (SQuAD's)."""

    def words(text: str) -> list[str]:
        bare = "".join(character for character in text.lower() if character not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", bare).split()

    return _overlap(words(answer), words(reference))


def f1_zh(answer: str, reference: str) -> float:
    """F1 of the Chinese words in common, without case, punctuation and white space."""
    left_out = set(string.punctuation + _CHINESE_PUNCTUATION)

    def words(text: str) -> list[str]:
        bare = ("".join(c for c in word.lower() if c not in left_out) for word in _jieba().cut(text, cut_all=False))
        return [word for word in ("".join(word.split()) for word in bare) if word]

    return _overlap(words(answer), words(reference))


def rouge_l(answer: str, reference: str) -> float:
    """F of ROUGE-L over all sentences; 0 if the answer has no words."""
    try:
        scores: Any = _rouge().get_scores([answer], [reference], avg=True)
    except (ValueError, RecursionError):
        # No words, or a sentence too long for the package. LongBench's scorer gives 0, too.
        return 0.0
    return float(scores["rouge-l"]["f"])


def rouge_l_zh(answer: str, reference: str) -> float:
    """`rouge_l` of Chinese words."""
    return rouge_l(*(" ".join(_jieba().cut(text, cut_all=False)) for text in (answer, reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them.

    A named class that is part of the right one's name does not count. As published, the class after it is then skipped.
    """
    named = [name for name in classes if name in answer]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            del named[at]
        at += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """Share of the answer's numbers that equal the paragraph number of a reference such as "Paragraph 7"."""
    return count(answer, _number(reference, r"Paragraph (\d+)"))


def retrieval_zh(answer: str, reference: str) -> float:
    """`retrieval` for a reference such as "段落7"."""
    return count(answer, _number(reference, r"段落(\d+)"))


def count(answer: str, reference: str) -> float:
    """Share of the answer's numbers that equal the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def edit_similarity(answer: str, reference: str) -> float:
    """Similarity of the reference and the answer's first line that is neither a comment nor a code fence."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _overlap(answer: Sequence[str], reference: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    if not common:
        return 0.0
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def _number(reference: str, pattern: str) -> str:
    found = re.search(pattern, reference)
    if found is None:
        raise ValueError(f"reference {reference!r} names no paragraph; it should match {pattern!r}")
    return found[1]


@cache
def _rouge() -> Any:
    return optional("rouge", "LongBench's ROUGE-L").Rouge()


@cache
def _jieba() -> Any:
    module = optional("jieba", "LongBench's scoring of Chinese")
    module.setLogLevel("WARNING")  # it logs the path of its dictionary
    return module
