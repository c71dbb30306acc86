"""The rewards of `./run.sh geo3k`: those of EasyR1's Geometry3K baseline, 0.9 for the answer and 0.1 for the format."""

import re

from grading.answers import last_boxed
from rewards import same_answer


def accuracy(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the last \\boxed{…} holds the answer, else 0."""
    boxed = last_boxed(completion)
    return float(boxed is not None and same_answer(boxed, answer))


def boxed(completion: str, answer: str, **_: object) -> float:
    """Return 1 for `<think>…</think>`, followed by text with a \\boxed{…}, else 0."""
    return float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", completion.strip(), re.DOTALL) is not None)
