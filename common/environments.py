"""Environments: what a model sees between its turns (docs/turns.md).

A plugin adds an entry to `ENVIRONMENTS`, and `--env NAME` chooses it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class Reply:
    """What an environment returns for a turn, if it is more than what the model sees next."""

    content: str | Image.Image | list[str | Image.Image] | None = None  # what the model sees next; None: it is over
    reward: float = 0.0  # for this turn


@dataclass(frozen=True)
class Environment:
    """An entry of `ENVIRONMENTS`."""

    reply: Callable[..., Reply | str | Image.Image | list[str | Image.Image] | None]
    """`reply(text, state, images, extents, **fields)` gets the text of the model's turn, and returns what the model
    sees next, or None if the episode is over. `state` is a dict of the episode's own, at first empty, which the
    function may change. `images` are those of the row, and `extents` the largest (x, y) in each, in the coordinates
    that the model uses. `fields` are the row's question, answer and other columns. What it raises is told the model."""
    tools: list[dict[str, Any]] = field(default_factory=list)  # their JSON schemas, for the chat template


ENVIRONMENTS: dict[str, Environment] = {}


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the tool call in a turn, in the format of Qwen; None if there is no call.

    The call is JSON between <tool_call> and </tool_call>. Raises ValueError if it is not, or if there are several.
    """
    calls = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    if not calls:
        return None
    if len(calls) > 1:
        raise ValueError("one call at a time")
    try:
        call = json.loads(calls[0])
    except (ValueError, RecursionError):
        call = None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)):
        raise ValueError('a call is JSON: {"name": ..., "arguments": {...}}')
    return call["name"], call["arguments"]
