"""What is chosen for a GPU's memory, on paper: the choice is arithmetic and needs no GPU."""

import pytest
import torch

import memory
from cli import UserError
from model import PolicyFlags, load_policy
from packing import language_model

GPU = torch.device("cuda")


@pytest.fixture
def policy(tiny_model):
    return load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))


def free(monkeypatch, policy, again: int, tokens: int, compiled: bool = True) -> None:
    """A GPU with room for micro-batches of `tokens` tokens when `again` layers are checkpointed, and no more."""
    fixed = 12 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    text = language_model(policy.model)
    fixed += 12 * memory.LOGIT_ROWS * len(text.embed_tokens.weight) + 12 * sum(
        p.numel() for p in text.layers[0].parameters()
    )
    total = 2**34
    room = fixed + memory.MARGIN * total + (tokens + 0.5) * memory.bytes_per_token(policy, again, compiled)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def checkpointed(policy) -> list[bool]:
    return [layer.gradient_checkpointing for layer in language_model(policy.model).layers]


@pytest.mark.parametrize(
    ("again", "tokens", "want", "want_tokens"),
    [
        (0, 50_000, [False] * 4, memory.MOST_TOKENS),  # more than is of use
        (0, 9_000, [False] * 4, 9_000),
        (1, 9_000, [False, False, False, True], 9_000),
        (2, 9_000, [False, True] * 2, 9_000),
        (4, 9_000, [True] * 4, 9_000),
        (4, 3_000, [True] * 4, 3_000),  # fewer than it would like, enough for the longest row
    ],
)
def test_as_few_layers_are_checkpointed_as_fit(policy, monkeypatch, again, tokens, want, want_tokens):
    free(monkeypatch, policy, again, tokens)
    assert memory.fit(policy, PolicyFlags(), 2000, GPU) == want_tokens
    assert checkpointed(policy) == want


def test_flags_decide_where_they_are_given(policy, monkeypatch):
    free(monkeypatch, policy, 0, 50_000)
    flags = PolicyFlags(micro_batch_tokens=777, activation_checkpointing="full")
    assert memory.fit(policy, flags, 2000, GPU) == 777
    assert checkpointed(policy) == [True] * 4
    assert memory.fit(policy, PolicyFlags(micro_batch_tokens=777), 2000, torch.device("cpu")) == 777


def test_a_row_that_cannot_fit_says_what_is_missing(policy, monkeypatch):
    free(monkeypatch, policy, 4, 1000)
    with pytest.raises(UserError, match=r"too small by 0\.\d GiB for a prompt and completion of 2000 tokens.*--max_p"):
        memory.fit(policy, PolicyFlags(), 2000, GPU)
