"""What is in an uploaded ZIP. The service looks through it in a process of its own: a picture that takes for ever, or
too much memory, takes nobody with it, and nobody waits for it."""

import os
import pathlib

from cli import UserError
from formats import Sample, read_rows
from images import check_image, read_source
from rewards import gold_problem

LOOK_THROUGH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "uploads.py:look_through")
SHOWN = 10  # problems that are told


def look_through(path: str, name: str) -> dict[str, object]:
    """{rows, images, problems} of the ZIP at `path`, or {error} when no row of it can be trained on. `name` stands for
    its path in messages."""
    try:
        rows, images, problems = _look_through(pathlib.Path(path))
    except UserError as error:
        return {"error": str(error).replace(path, name)}
    problems = [problem.replace(path, name) for problem in problems]
    if rows == len(problems):
        first = f": {problems[0]}" if problems else ""
        return {"error": f"{name} has no row that can be trained on{first}"}
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return {"rows": rows, "images": images, "usable": rows - len(problems), "problems": [*problems[:SHOWN], *more]}


def _look_through(path: pathlib.Path) -> tuple[int, int, list[str]]:
    rows = images = 0
    problems: list[str] = []
    for row in read_rows(str(path)):
        rows += 1
        try:
            if not isinstance(row, Sample):
                raise ValueError(row[1])
            check_image(read_source(row.images[0]))
            images += 1
            if problem := gold_problem("count", row.answer):
                raise ValueError(problem)
        except (ValueError, OSError) as problem:
            problems.append(f"{row.source if isinstance(row, Sample) else row[0]}: {problem}")
    return rows, images, problems
