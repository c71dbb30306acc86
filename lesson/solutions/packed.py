"""Solution of exercise 3."""

import torch
from torch import Tensor


def positions(prompt: int, lengths: list[int]) -> list[int]:
    found = list(range(prompt))
    for length in lengths:
        found += range(prompt, prompt + length)  # each completion continues after the prompt, not after the last one
    return found


def attends(prompt: int, lengths: list[int]) -> Tensor:
    allowed = torch.zeros(prompt + sum(lengths), prompt + sum(lengths), dtype=torch.bool)
    allowed[:, :prompt] = True
    start = prompt
    for length in lengths:
        allowed[start : start + length, start : start + length] = True
        start += length
    return allowed.tril()
