"""The rewards of `./run.sh real`."""

import re


def starts_with_the_sum(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the first number is the sum, whatever follows it, else 0."""
    number = re.match(r"\s*(-?\d+)", completion)
    return float(number is not None and int(number[1]) == int(answer))


def only_the_sum(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the first line is the sum and nothing else, else 0."""
    return float(completion.split("\n")[0].strip() == answer)
