"""An environment for tests/helpers/turns_worker.py. What it does depends on the row's column `kind`."""

import pathlib
import time

from common.environments import ENVIRONMENTS, Environment


def is_first(path: pathlib.Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def misbehave(kind: str, turn: int, folder: pathlib.Path) -> None:
    """Wait, hang or raise, if `kind` says so."""
    if kind == "slow" and turn == 1 and is_first(folder / "one is slow"):
        while not (folder / "another is done").exists():
            time.sleep(0.01)
    if kind == "fast" and turn == 3:
        (folder / "another is done").touch()
    if kind == "hangs" and turn == 1:
        time.sleep(60)
    if kind == "raises" and turn == 2:
        raise RuntimeError("the tool is broken")


def echo(text: str, state: dict, images: list, extents: list, kind: str, folder: str, **row: object) -> list:
    """Answer turn t with a text and, if the row has a picture, with t times the same part of it."""
    state["turn"] = turn = state.get("turn", 0) + 1
    misbehave(kind, turn, pathlib.Path(folder))
    number = sum(text.encode())
    answer = [f"This was turn {turn}, {number}."]
    if images:
        place = number % 20
        part = images[0].crop((place, place, place + 56, place + 40)).resize((84, 56 + 28 * (number % 3)))
        answer += [part] * (99 if kind == "many" else turn)
    return answer


ENVIRONMENTS["echo"] = Environment(echo)
