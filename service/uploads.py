"""Check an uploaded ZIP. `inspect_zip` runs in a subprocess with a time limit, so that a malicious image cannot hang or
crash the service.
"""

import pathlib
import zipfile

from common.errors import UserError
from common.records import Sample
from inputs.images import check_image, fitted_size, read_source
from inputs.rows import read_rows
from rewards import gold_problem

INSPECT_ZIP = f"{pathlib.Path(__file__).resolve()}:inspect_zip"
MAX_PROBLEMS = 10  # maximum number of bad rows that are reported
MAX_TABLE_BYTES = 16_000_000  # maximum size of main.csv; enough for about a hundred thousand rows
MAX_QUESTION_CHARS = 2000


def inspect_zip(path: str, name: str) -> dict[str, object]:
    """Return {rows, images, usable, problems} of the ZIP at `path`, or {error} if the ZIP has no usable row.

    Messages contain `name` instead of the path.
    """
    try:
        rows, images, problems = _inspect_zip(pathlib.Path(path))
    except UserError as error:
        return {"error": str(error).replace(path, name)}
    problems = [problem.replace(path, name) for problem in problems]
    if rows == len(problems):
        first = f": {problems[0]}" if problems else ""
        return {"error": f"{name} has no usable row{first}"}
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return {
        "rows": rows,
        "images": images,
        "usable": rows - len(problems),
        "problems": [*problems[:MAX_PROBLEMS], *more],
    }


def _inspect_zip(path: pathlib.Path) -> tuple[int, int, list[str]]:
    """Return the number of rows, the number of distinct usable images, and a description of each bad row."""
    _check_table(path)
    rows, images, problems = 0, set(), []
    for row in read_rows(str(path)):
        rows += 1
        try:
            if not isinstance(row, Sample):
                raise ValueError(row[1])
            images.add(_check_image(row))
            if problem := gold_problem("count", row.answer):
                raise ValueError(problem)
            if len(row.prompt) > MAX_QUESTION_CHARS:
                raise ValueError(
                    f"the question has {len(row.prompt)} characters; at most {MAX_QUESTION_CHARS} are allowed"
                )
        except (ValueError, OSError) as error:
            problems.append(f"{row.source if isinstance(row, Sample) else row[0]}: {error}")
    return rows, len(images), problems


def _check_table(path: pathlib.Path) -> None:
    """Raise UserError for a main.csv that is too large to check in time."""
    try:
        members = zipfile.ZipFile(path).infolist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # `read_rows` raises the error with the right message
    largest = max((m.file_size for m in members if m.filename.rpartition("/")[2] == "main.csv"), default=0)
    if largest > MAX_TABLE_BYTES:
        raise UserError(f"main.csv has {largest / 1e6:.0f} MB; at most {MAX_TABLE_BYTES / 1e6:.0f} MB are allowed")


def _check_image(row: Sample) -> str:
    """Return the path of the row's image in the ZIP. Raises ValueError when the image is missing or unusable."""
    path = str(getattr(row.images[0], "at", row.images[0]))
    try:
        height, width = check_image(read_source(row.images[0]))
    except FileNotFoundError:
        name = path.removeprefix("images/images/").removeprefix("images/")
        raise ValueError(f"there is no image {name!r} in the ZIP or in its folder images/") from None
    fitted_size(height, width, 56 * 56, 1280 * 28 * 28)  # raises ValueError for an extreme aspect ratio
    return path
