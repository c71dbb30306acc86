"""Exercise 3: the layout of a packed group. To check it: python -m lesson.check 3"""

import torch


def positions(prompt: int, lengths: list[int]) -> list[int]:
    """Return the position of each packed token: first a prompt of `prompt` tokens, then completions of `lengths`."""
    raise NotImplementedError("write `positions` in lesson/exercises/packed.py")


def attends(prompt: int, lengths: list[int]) -> torch.Tensor:
    """Return whether the packed token of a row attends to that of a column, as (T, T) booleans."""
    raise NotImplementedError("write `attends` in lesson/exercises/packed.py")
