"""Solution of exercise 5."""

import re

from rewards import vqa_reward


def honest_reward(completion: str, answer: str, digit: int, **fields: object) -> float:
    if vqa_reward(completion, answer) < 1:  # also if there is no think block
        return 0.0
    thought = completion.partition("</think>")[0]
    return float(set(re.findall(r"\d+", thought)) == {str(digit)})  # all numbers: "1 or 7" is a hedge, "17" is not a 1
