"""The buffers of vLLM's model, which keep their values while vLLM sleeps; see `rollout.VLLMEngine`."""

import torch
from torch import Tensor


def take_buffers(model: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a buffer of vLLM's `model` and a copy of it, and make `model.named_buffers()` return nothing.

    The buffers are constants, such as the table of rotary embeddings, so one copy is enough. vLLM would copy all that
    `named_buffers` returns to host memory, again whenever it goes to sleep.
    """
    copies = [
        (buffer, torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda).copy_(buffer))
        for buffer in model.buffers()
    ]
    model.named_buffers = lambda *args, **options: iter(())
    return copies
