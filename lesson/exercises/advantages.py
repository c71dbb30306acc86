"""Exercise 1: the advantages of one group. To check it: python -m lesson.check 1"""


def advantages(rewards: list[float]) -> list[float]:
    """Return each reward minus the group's mean, divided by the group's standard deviation (with n − 1).

    If all rewards are equal (up to 1e-6), there is nothing to learn: return exactly 0.0 for each.
    """
    raise NotImplementedError("write `advantages` in lesson/exercises/advantages.py")
