"""Measure the effect of a policy on quality: tasks, perplexity and fidelity of attention."""

from . import ruler as ruler
from .gsm8k import GSM8K as GSM8K
from .longbench import LongBench as LongBench
from .math_problems import MathProblems as MathProblems
from .multi_query import MultiQuery as MultiQuery
from .needle import NeedleInAHaystack as NeedleInAHaystack
from .perplexity import Perplexity as Perplexity
from .perplexity import streaming as streaming
from .perplexity import windowed as windowed
from .rescoring import rescore as rescore
from .runner import Evaluation as Evaluation
from .runner import evaluate as evaluate
from .task import Example as Example
from .task import Format as Format
from .task import Task as Task
