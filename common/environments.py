"""Environments: what a model sees between its turns (docs/turns.md).

A plugin adds an entry to `ENVIRONMENTS`, and `--env NAME` chooses it.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from common.errors import require

MAX_STATE = 2**20  # bytes of what an episode keeps between its turns; there may be a thousand episodes


@dataclass(frozen=True)
class Reply:
    """What an environment returns for a turn if it also gives a reward."""

    content: str | Image.Image | list[str | Image.Image] | None = None  # what the model sees; None ends the episode
    reward: float = 0.0  # for this turn


@dataclass(frozen=True)
class Environment:
    """An entry of `ENVIRONMENTS`."""

    reply: Callable[..., Reply | str | Image.Image | list[str | Image.Image] | None]
    """`reply(text, state, images, extents, **fields)` gets the text of the model's turn, and returns what the model
    sees next, or None if the episode is over. `state` is a dict of this episode, at first empty, which the
    function may change; if it raises, the changes are lost. `images` are those of the row, and `extents` the largest
    (x, y) in each, in the model's coordinates. `fields` are the row's question, answer and other columns. The model is
    told what the function raises."""
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas of the tools, for the chat template

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


_TAG = re.compile(r"\A|</?think>|<tool_call>|<\|python_tag\|>")
_CLOSE = re.compile(r"\s*+(?:(?:</tool_call>|<\|eo[mt]_id\|>)\s*+|\Z)")  # what follows a call


def tool_call(text: str, names: Collection[str] = ()) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the tool call in a turn; None if there is no call.

    A call is JSON after <tool_call> (Qwen) or <|python_tag|> (Llama 3.1). Llama may also leave out the tag: JSON with
    "name" and "parameters" is then a call if it is all that follows the thought. A call inside a thought does not
    count. If the `names` of the tools are given, JSON without a tag that names none of them is an answer.

    Raises ValueError if the text after a tag is no call in JSON or names an unknown tool, or for several calls.
    """
    calls = _calls(text, names)
    if not calls:
        return None
    if len(calls) > 1:
        raise ValueError("one call at a time")
    call = calls[0] if isinstance(calls[0], dict) else {}
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise ValueError('a call is JSON: {"name": ..., "arguments": {...}}')
    if names and name not in names:
        raise ValueError(f"there is no tool {name[:40]!r}, only {', '.join(names)}")
    return name, arguments


def _calls(text: str, names: Collection[str]) -> list[Any]:
    """Return the JSON of each call in a turn, None for what is not JSON."""
    calls: list[Any] = []
    end, is_thought = 0, False
    for tag in _TAG.finditer(text):
        if tag.start() < end or (is_thought and tag[0] != "</think>"):
            continue  # it is inside the call before it, or in a thought
        is_thought = tag[0] == "<think>"
        if is_thought:
            continue
        call, after = _json_at(text, tag.end())
        if tag[0] in ("", "</think>"):
            calls = []  # what came before was thought
            if after < len(text) or not _is_untagged_call(call, names):
                continue
        calls.append(call)
        end = after
    return calls


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON at text[start:] and the end of the `_CLOSE` after it; None and `start` if either is missing."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, re.compile(r"\s*").match(text, start).end())
    except (ValueError, RecursionError):
        return None, start
    close = _CLOSE.match(text, end)
    return (value, close.end()) if close else (None, start)


def _is_untagged_call(value: Any, names: Collection[str]) -> bool:
    keys = {"name", "parameters"}
    is_call = isinstance(value, dict) and keys <= value.keys() <= keys | {"type"} and isinstance(value["name"], str)
    return is_call and (not names or value["name"] in names)
