"""The tasks of `./run.sh vlm`, a plugin: what a shape costs, and answers of a word or a short sentence."""

import re

from rewards import TASKS, Task

SUM = re.compile(r"\d+ \+ \d+ = \d+")
AS_IT_IS = "{{ content }}"


def ends_with_the_number(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the last number is the answer, whatever stands before it, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def exact_match(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the completion is the answer and nothing else, but for capitals and a full stop, else 0."""

    def plain(text: str) -> str:
        return text.strip().removesuffix(".").lower()

    return float(plain(completion) == plain(answer))


def has_a_sum(completion: str, **_: object) -> bool:
    """Return whether a sum is written out."""
    return bool(SUM.search(completion))


def is_short(completion: str, **_: object) -> bool:
    """Return whether there are at most three words, such as "A red circle."."""
    return len(completion.split()) <= 3


TASKS["prices"] = Task(ends_with_the_number, template=AS_IT_IS, format=has_a_sum)
TASKS["what"] = Task(exact_match, template=AS_IT_IS, format=is_short)
