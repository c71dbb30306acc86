"""Try an environment without a model: `try_environment` gives it the turns that you write (docs/turns.md)."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

from PIL import Image

import rewards
from common.environments import Reply
from common.errors import UserError, describe
from grading.calls import load_function
from parts.turns.worker import take_turn

MAX_TEXT = 2**16  # characters of an answer; in a run, what fits into max_prompt_length


def try_environment(
    function: str, turns: Sequence[str], images: Sequence[Image.Image] = (), extent: int = 1000, **row: Any
) -> list[Reply]:
    """Return what the environment `function`, "file.py:name", answers to each of the model's `turns`, and its rewards.

    `images`, `row`: the pictures and the other columns of a row, such as question and answer. `extent`: the largest x
    and y that the model uses; 0: the pixels of each picture. An answer with content None ends the episode. What the
    function raises is an answer, as in a run: "error: …". Raises UserError for turns after the end, AttributeError if
    the file has no such function.
    """
    load_function(function)
    encoded = [_encode(image) for image in images]
    extents = [(extent, extent) if extent else image.size for image in images]
    state, replies = pickle.dumps({}), list[Reply]()
    for number, text in enumerate(turns, 1):
        if replies and replies[-1].content is None:
            raise UserError(f"the episode is over after turn {number - 1}: leave out those that follow")
        fields = {"question": "", "answer": ""} | row | {"text": text, "images": encoded, "extents": extents}
        try:
            content, reward, state = take_turn(function, state, fields, MAX_TEXT, rewards.MAX_REWARD)
            replies.append(Reply(content, reward))
        except Exception as error:  # noqa: BLE001 - the function may raise anything, which the model is told
            replies.append(Reply([f"error: {describe(error)}"]))
    return replies


def _encode(image: Image.Image) -> bytes:
    """Return `image` as the bytes of a PNG file, as a row has it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
