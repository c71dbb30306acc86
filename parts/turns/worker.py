"""What runs in the workers of an environment (see `episodes.py`): the user's function, and checks of its answer."""

import pickle
import reprlib
from numbers import Real
from typing import Any

from PIL import Image

from common import environments
from common.environments import Reply
from grading.calls import load_function, parameters
from inputs.images import MAX_MEGAPIXELS, decode_image


def take_turn(
    function: str, state: bytes, fields: dict[str, Any], max_text: int, max_reward: float
) -> tuple[list[str | Image.Image] | None, float, bytes]:
    """Call the environment's `function`, "file.py:name"; return what the model sees next, the reward, and the state.

    The state is pickled: its classes may be the plugin's own, which only the workers know by the same name. The row's
    images are encoded, as they are smaller then. Raises ValueError if the answer is invalid or too large.
    """
    own = pickle.loads(state)
    names, _, accepts_any, _ = parameters(function)
    wanted = {name: value for name, value in (fields | {"state": own}).items() if accepts_any or name in names}
    if "images" in wanted:
        wanted["images"] = [decode_image(image) for image in fields["images"]]
    answer = load_function(function)(**wanted)
    reply = answer if isinstance(answer, Reply) else Reply(answer)
    content = [reply.content] if isinstance(reply.content, str | Image.Image) else reply.content
    reward = reply.reward.item() if hasattr(reply.reward, "item") else reply.reward  # NumPy and torch scalars
    if not isinstance(reward, Real) or not abs(float(reward)) < max_reward:  # nor if it is NaN
        raise ValueError(f"its reward is {reprlib.repr(reward)}; expected a finite number")
    state = pickle.dumps(own)
    if len(state) > environments.MAX_STATE:  # looked up late, so that a plugin can change it
        raise ValueError(f"its state of {len(state):,} bytes is too large")
    if content is None:
        return None, float(reward), state
    if not isinstance(content, list) or not all(isinstance(part, str | Image.Image) for part in content):
        raise ValueError(f"it returned a {type(reply.content).__name__}; expected texts and images, or None")
    if (length := sum(len(part) for part in content if isinstance(part, str))) > max_text:
        raise ValueError(f"its answer of {length:,} characters is too long")
    sizes = [part.width * part.height for part in content if isinstance(part, Image.Image)]
    if 0 in sizes:
        raise ValueError("its picture has no pixels")
    if (pixels := sum(sizes)) > MAX_MEGAPIXELS * 1e6:  # of all pictures together, which are sent to the trainer
        raise ValueError(f"its pictures of {pixels / 1e6:,.0f} megapixels are too large")
    # `copy` returns the plain class of images: the trainer unpickles no other
    return [part if isinstance(part, str) else part.copy() for part in content], float(reward), state
