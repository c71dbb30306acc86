"""Environments: what a model sees between its turns (docs/turns.md).

A plugin adds an entry to `ENVIRONMENTS`, and `--env NAME` chooses it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from common.errors import require

MAX_STATE = 2**20  # bytes of what an episode keeps between its turns; there may be a thousand episodes


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
    function may change; if it raises, its changes are lost. `images` are those of the row, and `extents` the largest
    (x, y) in each, in the coordinates that the model uses. `fields` are the row's question, answer and other columns.
    What it raises is told the model."""
    tools: list[dict[str, Any]] = field(default_factory=list)  # their JSON schemas, for the chat template

    def __post_init__(self) -> None:
        """Raise ValueError if `reply` is no function, or if `tools` are no schemas as chat templates take them."""
        require(callable(self.reply), f"reply is a {type(self.reply).__name__}; expected a function")
        try:
            are_schemas = all(tool["function"]["name"] for tool in json.loads(json.dumps(self.tools)))
        except (TypeError, KeyError, ValueError):
            are_schemas = False
        expected = '[{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        require(are_schemas, f"tools: expected JSON schemas, {expected}")


ENVIRONMENTS: dict[str, Environment] = {}


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the tool call in a turn; None if there is no call.

    It is JSON between <tool_call> and </tool_call>, as Qwen writes it, or the whole turn, as Llama 3 does. What is only
    thought is no call. Raises ValueError if it is no JSON of a call, or if there are several.
    """
    text = text.rpartition("</think>")[2]
    calls = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
    calls = calls or re.findall(r'^\s*(\{\s*"name":.*"parameters":.*\})\s*$', text, re.DOTALL)
    if not calls:
        return None
    if len(calls) > 1:
        raise ValueError("one call at a time")
    try:
        call = json.loads(calls[0])
    except (ValueError, RecursionError):
        call = None
    if isinstance(call, dict):
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(name, str) and isinstance(arguments, dict):
            return name, arguments
    raise ValueError('a call is JSON: {"name": ..., "arguments": {...}}')
