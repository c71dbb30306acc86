"""What is in an uploaded ZIP. The service looks through it in a process of its own: a picture that takes for ever, or
too much memory, takes nobody with it, and nobody waits for it."""

import pathlib
import zipfile

from common.errors import UserError
from common.records import Sample
from inputs.images import check_image, fitted_size, read_source
from inputs.rows import read_rows
from rewards import gold_problem

INSPECT_ZIP = f"{pathlib.Path(__file__).resolve()}:look_through"
SHOWN = 10  # problems that are told
MAX_TABLE_BYTES = 16_000_000  # bytes of main.csv: a hundred thousand rows
MAX_QUESTION_CHARS = 2000  # characters


def inspect_zip(path: str, name: str) -> dict[str, object]:
    """{rows, images, problems} of the ZIP at `path`, or {error} when no row of it can be trained on. `name` stands for
    its path in messages."""
    try:
        rows, images, problems = _inspect_zip(pathlib.Path(path))
    except UserError as error:
        return {"error": str(error).replace(path, name)}
    problems = [problem.replace(path, name) for problem in problems]
    if rows == len(problems):
        first = f": {problems[0]}" if problems else ""
        return {"error": f"{name} has no row that can be trained on{first}"}
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return {"rows": rows, "images": images, "usable": rows - len(problems), "problems": [*problems[:SHOWN], *more]}


def _inspect_zip(path: pathlib.Path) -> tuple[int, int, list[str]]:
    """Rows, different pictures that can be used, and what is wrong with each row that cannot."""
    _check_table(path)
    rows, images, problems = 0, set(), []
    for row in read_rows(str(path)):
        rows += 1
        try:
            if not isinstance(row, Sample):
                raise ValueError(row[1])
            images.add(_check_picture(row, path))
            if problem := gold_problem("count", row.answer):
                raise ValueError(problem)
            if len(row.prompt) > MAX_QUESTION_CHARS:
                raise ValueError(f"its question has {len(row.prompt)} characters, {MAX_QUESTION_CHARS} at most")
        except (ValueError, OSError) as problem:
            problems.append(f"{row.source if isinstance(row, Sample) else row[0]}: {problem}")
    return rows, len(images), problems


def _check_table(path: pathlib.Path) -> None:
    """Raise UserError for a main.csv that would keep this process busy for long."""
    try:
        members = zipfile.ZipFile(path).infolist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # the reader says what is wrong with it
    largest = max((m.file_size for m in members if m.filename.rpartition("/")[2] == "main.csv"), default=0)
    if largest > MAX_TABLE_BYTES:
        raise UserError(f"main.csv has {largest / 1e6:.0f} MB, {MAX_TABLE_BYTES / 1e6:.0f} MB at most")


def _check_picture(row: Sample, path: pathlib.Path) -> str:
    """The picture's place in the ZIP. Raises ValueError when it is not there or cannot be trained on."""
    place = str(getattr(row.images[0], "at", row.images[0]))
    try:
        height, width = check_image(read_source(row.images[0]))
    except FileNotFoundError:
        shown = place.removeprefix("images/images/").removeprefix("images/")
        raise ValueError(f"there is no picture «{shown}» in the ZIP, nor in its folder images/") from None
    fitted_size(height, width, 56 * 56, 1280 * 28 * 28)  # its sides may differ too much
    return place
