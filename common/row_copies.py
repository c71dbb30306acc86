"""Copy rows of a tensor, some of them several times, with gradients that are summed in a fixed order.

For `x[source]`, torch would sum the gradients of a row's copies in any order on a CPU, so that runs with the same seed
would differ. On a GPU, it would sort `source` in every layer. Here, the copies of each row are found once per batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class RowCopies:
    """Which of N rows to copy, some of them several times, and the indices of each row's copies among all K copies."""

    source: Tensor  # (K,) the row that each copy is of
    first: Tensor  # (N,) first copy of each row; K: there is none
    repeated: Tensor  # (R,) rows with several copies
    copies: Tensor  # (R, M) all copies of these rows, where M is the largest number of copies; K: no further copy

    @classmethod
    def plan(cls, source: Tensor, num_rows: int) -> "RowCopies":
        """Find the copies of each row in `source` (K,)."""
        counts = source.bincount(minlength=num_rows)
        by_row = F.pad(source.argsort(stable=True), (0, 1), value=len(source))  # the copies, sorted by row, and then K
        start = counts.cumsum(0) - counts  # index of each row's first copy in `by_row`
        repeated = (counts > 1).nonzero()[:, 0]
        nth = torch.arange(int(counts.max()))
        indices = torch.where(nth < counts[repeated, None], start[repeated, None] + nth, -1)
        return cls(source, by_row[torch.where(counts > 0, start, -1)], repeated, by_row[indices])


def copy_rows(x: Tensor, copies: RowCopies) -> Tensor:
    """Return the copies (K, ...) of rows of `x` (N, ...).

    In the backward pass, the gradients of the copies of a row are summed in float32, in a fixed order.
    """
    return _CopyRows.apply(x, copies)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, copies: RowCopies) -> Tensor:
        ctx.copies = copies
        return x[copies.source]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad, copies = torch.cat([grad, torch.zeros_like(grad[:1])]), ctx.copies  # copy K is zero
        summed = grad[copies.first]
        summed[copies.repeated] = grad[copies.copies].sum(1)
        return summed, None
