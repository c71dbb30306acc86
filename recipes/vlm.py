"""The rewards of `./run.sh vlm`."""

import re


def ends_with_the_number(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the last number is the answer, whatever stands before it, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def exact_match(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the completion is the answer and nothing else, but for capitals and a full stop, else 0."""
    return float(completion.strip().removesuffix(".").lower() == answer.lower())
