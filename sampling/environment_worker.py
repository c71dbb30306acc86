"""What runs in the workers of an environment (see `episodes.py`): the user's function, and checks of its answer."""

from typing import Any

from PIL import Image

from common.environments import Reply
from grading.sandbox import load_function


def take_turn(
    function: str, state: dict[str, Any], max_text: int, max_megapixels: float, **fields: Any
) -> tuple[list[str | Image.Image] | None, float, dict[str, Any]]:
    """Call the environment's `function`, "file.py:name"; return what the model sees next, the reward, and the state.

    Raises ValueError if the answer is none, or too large to be sent.
    """
    answer = load_function(function)(state=state, **fields)
    reply = answer if isinstance(answer, Reply) else Reply(answer)
    content = [reply.content] if isinstance(reply.content, str | Image.Image) else reply.content
    if content is None:
        return None, float(reply.reward), state
    if not isinstance(content, list) or not all(isinstance(part, str | Image.Image) for part in content):
        raise ValueError(f"it returned a {type(reply.content).__name__}; expected texts and images, or None")
    if (length := sum(len(part) for part in content if isinstance(part, str))) > max_text:
        raise ValueError(f"its answer of {length:,} characters is too long")
    for image in content:
        if isinstance(image, Image.Image) and image.width * image.height > max_megapixels * 1e6:
            raise ValueError(f"its picture of {image.width} x {image.height} pixels is too large")
    return content, float(reply.reward), state
