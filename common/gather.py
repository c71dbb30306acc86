"""Copy rows of a tensor, some of them several times, with gradients that are summed in a fixed order.

For `x[index]`, torch would sum the gradients of a row's copies in any order on a CPU, so that runs with the same seed
would differ. On a GPU, it would sort the index in every layer. Here, the copies of each row are found once per batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class Gather:
    """Which of N rows to copy, some of them several times, and where the K copies of each row are; see `gather`."""

    index: Tensor  # (K,) row of each copy
    first: Tensor  # (N,) first copy of each row; K: there is none
    repeated: Tensor  # (R,) rows with several copies
    copies: Tensor  # (R, M) all copies of these rows, where M is the largest number of copies; K: no further copy

    @classmethod
    def plan(cls, index: Tensor, num_rows: int) -> "Gather":
        """Find the copies of each row in `index` (K,)."""
        counts = index.bincount(minlength=num_rows)
        by_row = F.pad(index.argsort(stable=True), (0, 1), value=len(index))  # copies, sorted by row; at the end, K
        start = counts.cumsum(0) - counts  # place of each row's first copy in `by_row`
        repeated = (counts > 1).nonzero()[:, 0]
        nth = torch.arange(int(counts.max()))
        places = torch.where(nth < counts[repeated, None], start[repeated, None] + nth, -1)
        return cls(index, by_row[torch.where(counts > 0, start, -1)], repeated, by_row[places])


def gather(x: Tensor, rows: Gather) -> Tensor:
    """Return the copies (K, ...) of rows of `x` (N, ...) that `rows` names.

    In the backward pass, the gradients of the copies of a row are summed in float32, in a fixed order.
    """
    return _Gather.apply(x, rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rows: Gather) -> Tensor:
        ctx.rows = rows
        return x[rows.index]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad, rows = torch.cat([grad, torch.zeros_like(grad[:1])]), ctx.rows  # row K is zero
        summed = grad[rows.first]
        summed[rows.repeated] = grad[rows.copies].sum(1)
        return summed, None
