"""Check uploaded ZIPs and decode uploaded images.

These functions run in worker processes with limited time and memory, so that a malicious image can neither hang nor
crash the service, which never opens an image itself. They do not use `data.validate_rows`, which would load torch.
"""

import io
import itertools
import pathlib
import re
import resource

from common.errors import UserError
from common.records import TAG, ImageSource, Sample
from config import DataFlags
from inputs.images import MAX_MEGAPIXELS, check_image, decode_image, fitted_size, read_source
from inputs.rows import Problem, read_rows
from parts.formats import open_zip
from rewards import gold_problem

FUNCTIONS = [f"{pathlib.Path(__file__).resolve()}:{name}" for name in ("inspect_zip", "draw_thumbnail", "to_png")]
INSPECT_ZIP, DRAW_THUMBNAIL, TO_PNG = FUNCTIONS
MAX_PROBLEMS = 10  # maximum number of bad rows that are reported
MAX_TABLE_BYTES = 16_000_000  # maximum size of main.csv; enough for about a hundred thousand rows
MAX_QUESTION_CHARS = 2000
CONTROL_TOKEN = re.compile(r"<\|\w+\|>")  # as most models write it; only a job, which has a tokenizer, knows all
THUMBNAIL = (240, 240)


def limit_memory() -> None:
    """Limit the memory of this process to what decoding one image of the largest allowed size takes."""
    max_bytes = 2**30 + int(16e6 * MAX_MEGAPIXELS)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))


def draw_thumbnail(path: str, number: int) -> tuple[bytes, str, str] | str:
    """Return (PNG, question, answer) of row `number` of the ZIP at `path`, or an error message."""
    limit_memory()
    samples = (row for row in read_rows(path) if isinstance(row, Sample))
    sample = next(itertools.islice(samples, number, None), None)
    if sample is None:
        return f"the file has no row {number}"
    try:
        image = decode_image(sample.images[0])
    except (ValueError, OSError):
        return f"the image of row {number} cannot be read"
    image.thumbnail(THUMBNAIL)
    image.save(png := io.BytesIO(), "PNG")
    return png.getvalue(), sample.prompt.replace(TAG, ""), sample.answer


def to_png(source: str, target: str) -> str | None:
    """Decode the image at `source` and write it to `target` as a PNG. Return an error message, or None."""
    limit_memory()
    try:
        image = decode_image(source)
        fitted_size(image.height, image.width, DataFlags.min_pixels, DataFlags.max_pixels)  # refuses extreme shapes
        image.save(target)
    except ValueError as error:
        return f"the image cannot be used: {error}"
    return None


def inspect_zip(path: str, name: str) -> dict[str, object]:
    """Return {rows, images, usable, problems} of the ZIP at `path`, or {error} if it has no usable row.

    Messages contain `name` instead of the path.
    """
    limit_memory()
    rows, problems = 0, []
    image_problems: dict[str, str | None] = {}
    try:
        table = open_zip(pathlib.Path(path))[0] / "main.csv"
        size = table.root.getinfo(table.at).file_size
        if size > MAX_TABLE_BYTES:
            raise UserError(f"main.csv has {size / 1e6:.0f} MB; at most {MAX_TABLE_BYTES / 1e6:.0f} MB are allowed")
        for row in read_rows(path):
            rows += 1
            if problem := _row_problem(row, image_problems):
                problems.append(problem.replace(path, name))
    except UserError as error:
        return {"error": str(error).replace(path, name)}
    if rows == len(problems):
        return {"error": ": ".join([f"{name} has no usable row", *problems[:1]])}
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    images = list(image_problems.values()).count(None)
    usable = rows - len(problems)
    return {"rows": rows, "images": images, "usable": usable, "problems": problems[:MAX_PROBLEMS] + more}


def _row_problem(row: Sample | Problem, image_problems: dict[str, str | None]) -> str | None:
    """Return where and why a row cannot be used, or None. `image_problems` has those of the images so far."""
    if isinstance(row, Problem):
        return ": ".join(row)
    image = row.images[0]
    if str(image) not in image_problems:
        image_problems[str(image)] = _image_problem(image)
    problem = image_problems[str(image)] or gold_problem("count", row.answer)
    if not problem and len(row.prompt) > MAX_QUESTION_CHARS:
        problem = f"the question has more than {MAX_QUESTION_CHARS} characters"
    if not problem and (token := CONTROL_TOKEN.search(row.prompt)):
        problem = f"the question contains the control token {token[0]}"
    return problem and f"{row.source}: {problem}"


def _image_problem(image: ImageSource) -> str | None:
    """Return why an image cannot be used, or None."""
    try:
        height, width = check_image(read_source(image))
        fitted_size(height, width, DataFlags.min_pixels, DataFlags.max_pixels)  # refuses extreme shapes
    except FileNotFoundError:
        name = image.at.removeprefix("images/images/").removeprefix("images/")
        return f"there is no image {name!r} in the ZIP or in its folder images/"
    except (ValueError, OSError) as error:
        return str(error)
    return None
