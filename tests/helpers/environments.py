"""A plugin with environments for tests."""

import os
import pathlib
import signal
import time

from PIL import Image

from common.environments import ENVIRONMENTS, Environment, Reply

if "MARKS" in os.environ:  # see `killer`
    os.environ.setdefault("RUN_TO_KILL", str(os.getpid()))  # the workers inherit this


def over(text, state, images, extents, **row):
    """End every episode after its first turn."""
    return None


def pictures(text, state, images, extents, question, answer, pictures=True, **row):
    """Answer with pictures and text; the sizes depend on the turn. Some episodes are over after two turns."""
    state["turns"] = state.get("turns", 0) + 1
    reward = len(text) % 3 / 2
    if state["turns"] == 3 or (state["turns"] == 2 and len(text) % 2):
        return Reply(None, reward)
    size = (56 + 28 * (len(text) % 2), 28 + 56 * state["turns"])
    first = Image.new("RGB", size, (40 * state["turns"], 9 * len(text) % 256, 90))
    second = Image.linear_gradient("L").resize((84, 56))
    return Reply(["Look: ", first, " and ", second, "?"] if pictures else f"Look, turn {state['turns']}: é?", reward)


def killer(*args, **fields):
    """Do what `pictures` does, but the 105th call of all kills the run if the folder of MARKS has no file "killed".

    Checkpoints are written beside the training: it waits until there is one, in the folder `run` beside MARKS.
    """
    folder = pathlib.Path(os.environ["MARKS"])
    (folder / f"call-{time.monotonic_ns()}").touch()
    if not (folder / "killed").exists() and len(list(folder.glob("call-*"))) >= 105:
        (folder / "killed").touch()
        until = time.monotonic() + 8  # a call may take 10 s
        while not list(folder.parent.glob("run/checkpoint-?")) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int(os.environ["RUN_TO_KILL"]), signal.SIGKILL)
    return pictures(*args, **fields)


def varied(text, state, images, extents, **row):
    """End a third of all episodes after each turn, and answer the others as `pictures` does, with one picture."""
    state["turns"] = state.get("turns", 0) + 1
    if len(text) % 3 == 0:
        return Reply(None, state["turns"] % 2)
    return ["Look: ", Image.new("RGB", (56, 28 + 28 * (state["turns"] % 3)), (40 * state["turns"], 9, 90)), "?"]


class Unpicklable:
    def __reduce__(self):
        raise TypeError("it has an open file")


class Memory:
    """A class of the plugin's own, in a state."""

    def __init__(self):
        self.turns = 0


FAULTS = {
    "dict": lambda: {"role": "tool"},
    "number": lambda: Reply(3),
    "list": lambda: ["a", None],
    "nan": lambda: Reply("go on", float("nan")),
    "inf": lambda: Reply(None, float("inf")),
    "huge": lambda: Reply(None, 10**400),
    "large": lambda: Reply("go on", 1e300),
    "reward": lambda: Reply("go on", None),
    "quoted": lambda: Reply("go on", "1.5"),
    "pixels": lambda: Image.new("1", (20_000, 20_000)),
    "together": lambda: [Image.new("1", (6_000, 6_000))] * 2,
    "strip": lambda: Image.new("L", (20_000, 60)),
    "thin": lambda: Image.new("RGB", (1, 300)),
    "many": lambda: [Image.new("RGB", (56, 56))] * 9,
    "text": lambda: "a" * 10_000_000,
    "long": lambda: Reply("a" * 2_000, 1.0),
    "nothing": lambda: [],
    "no text": lambda: "",
    "half": lambda: "a \ud800 b",
    "no pixels": lambda: Image.new("RGB", (0, 0)),
    "control": lambda: "a <|im_end|> b <|image_pad|>",
    "picture": lambda: ["see ", Image.new("I;16", (60, 90), 9)],
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(0.2),
}


def faulty(text, state, images, extents, **row):
    """Do what the turn says, of `FAULTS`; otherwise raise with its text, or change the state."""
    state["turns"], text = state.get("turns", 0) + 1, text.removeprefix("<think>\n")
    if text == "state":
        state["file"] = Unpicklable()
    if text == "hoard":
        state["pages"] = b"a" * 10_000_000
    if text == "own":
        memory = state.setdefault("own", Memory())
        memory.turns += 1
        return f"{state['turns']} and {memory.turns}"
    if text in FAULTS:
        return FAULTS[text]()
    if text in ("state", "hoard", "go on"):
        return f"turn {state['turns']}"
    raise ValueError(f"no fault is called {text!r} <|im_end|>\n<|image_pad|> \udcff")


def hint(text, state, hint):
    """Need a column that the rows of other tests do not have."""
    return None


def failing(text, state, images, extents, **row):
    """Fail in another way in each turn, without waiting."""
    names = ("dict", "nan", "pixels", "strip", "many", "text", "control", "exit", "picture", "other")
    return faulty(names[len(text) % len(names)], state, images, extents)


def parts(completion, answer, **fields):
    """A reward of each half of the last turn."""
    half = len(completion) // 2
    return [(0, half, 1.0), (half, len(completion), float(len(completion) % 2))] if half else 0.0


for function in (over, pictures, varied, killer, faulty, failing, hint):
    ENVIRONMENTS[function.__name__] = Environment(function)
ENVIRONMENTS["function"] = over  # type: ignore[assignment]
ENVIRONMENTS["nameless"] = Environment(lambda **_: None)


async def awaited(text, state, **fields):
    """An environment is no `async def`."""


ENVIRONMENTS["awaited"] = Environment(awaited)
