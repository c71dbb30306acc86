"""Check an uploaded ZIP. `inspect_zip` runs in a subprocess with a time limit, so that a malicious image cannot hang or
crash the service. It does not use `data.validate_rows`, which would load torch.
"""

import pathlib

from common.errors import UserError
from common.records import Sample
from inputs.images import check_image, fitted_size, read_source
from inputs.rows import open_zip, read_rows
from rewards import gold_problem

INSPECT_ZIP = f"{pathlib.Path(__file__).resolve()}:inspect_zip"
MAX_PROBLEMS = 10  # maximum number of bad rows that are reported
MAX_TABLE_BYTES = 16_000_000  # maximum size of main.csv; enough for about a hundred thousand rows
MAX_QUESTION_CHARS = 2000


def inspect_zip(path: str, name: str) -> dict[str, object]:
    """Return {rows, images, usable, problems} of the ZIP at `path`, or {error} if it has no usable row.

    Messages contain `name` instead of the path.
    """
    rows, images, problems = 0, set(), []
    try:
        table = open_zip(pathlib.Path(path)) / "main.csv"
        size = table.root.getinfo(table.at).file_size
        if size > MAX_TABLE_BYTES:
            raise UserError(f"main.csv has {size / 1e6:.0f} MB; at most {MAX_TABLE_BYTES / 1e6:.0f} MB are allowed")
        for row in read_rows(path):
            rows += 1
            if problem := _problem(row, images):
                problems.append(problem.replace(path, name))
    except UserError as error:
        return {"error": str(error).replace(path, name)}
    if rows == len(problems):
        return {"error": ": ".join([f"{name} has no usable row", *problems[:1]])}
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    usable = rows - len(problems)
    return {"rows": rows, "images": len(images), "usable": usable, "problems": problems[:MAX_PROBLEMS] + more}


def _problem(row: Sample | tuple[str, str], images: set[str]) -> str | None:
    """Return where and why a row cannot be used, or None. Adds the path of a usable image to `images`."""
    if not isinstance(row, Sample):
        return ": ".join(row)
    image = row.images[0]
    try:
        height, width = check_image(read_source(image))
        fitted_size(height, width, 56 * 56, 1280 * 28 * 28)  # raises ValueError for an extreme aspect ratio
    except FileNotFoundError:
        name = image.at.removeprefix("images/images/").removeprefix("images/")
        return f"{row.source}: there is no image {name!r} in the ZIP or in its folder images/"
    except (ValueError, OSError) as error:
        return f"{row.source}: {error}"
    images.add(str(image))
    if problem := gold_problem("count", row.answer):
        return f"{row.source}: {problem}"
    if len(row.prompt) > MAX_QUESTION_CHARS:
        return f"{row.source}: the question has more than {MAX_QUESTION_CHARS} characters"
    return None
