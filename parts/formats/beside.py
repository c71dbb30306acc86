"""What a row or a turn has beside its text: a reasoning, which is used; tools, calls and more, which are refused."""

import functools
import re

from inputs.rows import RowError

REASONING = ("reasoning_content", "reasoning", "thinking", "think", "thought", "thoughts")
TOOLS = ("tools", "functions", "tool_calls", "tool_call", "function_calls", "function_call")
BESIDE = {*TOOLS, *REASONING}  # a turn
TRAINED = ("loss", "loss_mask", "loss_scale", "loss_weight", "weight", "train", "trainable")
LABEL = re.compile("[a-zA-Z0-9_-]{1,20}")  # of a row, in a column such as "reasoning": "on", "spatial"
is_refused = functools.lru_cache(  # by the name of a column
    re.compile(rf"(?i)((chat|conversation|dialog|dialogue)_)?history|{'|'.join(TOOLS)}").fullmatch
)


def carries(value: object) -> bool:
    """Return whether a value holds something: a text of an empty list does not, nor does a list of nulls."""
    if isinstance(value, dict):
        return any(map(carries, value.values()))
    if isinstance(value, list | tuple):
        return any(map(carries, value))
    if isinstance(value, str):
        return value.strip().lower() not in ("", "[]", "{}", "null", "none", "nan")
    return bool(value) and value == value


def refuse_beside(row: dict) -> None:
    """Raise RowError for a column that belongs to the prompt or the answer, but is not used."""
    for name in filter(is_refused, row):
        if not isinstance(row[name], str | list | dict) or not carries(row[name]):
            continue
        if name.lower() not in TOOLS:
            raise RowError(f"'{name}' holds earlier turns: write them and the question as a chat in 'messages'")
        raise RowError(f"the column '{name}' holds tools or calls, which are not used: remove it or the row")
    if row.get("loss") is False:
        raise RowError("'loss' is false, so the row is not to be trained on: remove the row or 'loss'")


def refuse_in_turn(turn: dict, role: str | None) -> None:
    """Raise RowError for what a turn of a prompt has beside its text."""
    for name in filter(BESIDE.__contains__, turn):
        if isinstance(turn[name], str | list | dict) and carries(turn[name]):
            what = "tools and calls" if name in TOOLS else "a reasoning before the last answer"
            raise RowError(f"the {role}'s turn has '{name}', but {what} cannot be shown: remove it or the row")


def check_reply(turn: dict) -> None:
    """Raise RowError if the last turn, which is the answer, calls a tool or is not to be trained on."""
    refuse_in_turn({name: turn[name] for name in TOOLS if name in turn}, "assistant")
    for name in filter(TRAINED.__contains__, turn):
        if str(turn[name]).lower() not in ("none", "nan", "", "true", "1", "1.0"):
            problem = f"the assistant's last turn has '{name}': {turn[name]}, so it is not to be trained on"
            raise RowError(f"{problem}: remove '{name}', the turn or the row")


def with_reasoning(response: str, beside: dict, is_turn: bool = False) -> str:
    """Return an answer behind the reasoning that its turn or row has `beside` it, as `<think>…</think>`.

    A flag is no reasoning, nor is a single word that a row has. Raises RowError if the answer has another reasoning.
    """
    for name in filter(beside.__contains__, REASONING):
        value = beside[name]
        if not isinstance(value, str | list | dict) or not carries(value):
            continue
        if not isinstance(value, str):
            raise RowError(f"'{name}' is not text: write the reasoning before the answer as one text")
        if LABEL.fullmatch(value) and not is_turn and name != "reasoning_content":
            continue
        reasoning = re.sub(r"(?i)^\s*<think>|</think>\s*$", "", value).strip()
        if re.search(r"(?i)</?(think|answer)>", reasoning):
            raise RowError(f"'{name}' contains tags of an answer: write only the reasoning there")
        if not response.strip():
            raise RowError(f"'{name}' stands beside an empty answer: write the answer")
        if not re.search(r"(?i)</?think>", response):
            response = f"<think>\n{reasoning}\n</think>\n\n{response}"
        elif reasoning not in response:
            raise RowError(f"'{name}' and the reasoning in the answer differ: remove one of them")
    return response
