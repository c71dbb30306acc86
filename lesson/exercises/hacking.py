"""Exercise 5: a reward that sees the reasoning. To check it: python -m lesson.check 5"""


def honest_reward(completion: str, answer: str, digit: int, **fields: object) -> float:
    """Return 1 if the answer is right and the think block names `digit` and no other digit, else 0.

    `rewards.vqa_reward(completion, answer)` says whether the answer is right.
    """
    raise NotImplementedError("write `honest_reward` in lesson/exercises/hacking.py")
