"""Samples from files, images, prompts.

One picture, one set of tokens: an image is decoded, oriented, flattened and resized here, once, and no later processor
resizes it again. The sampler gets a prompt with one placeholder for each image; the trainer gets the same prompt with
every image expanded to its tokens.

Formats (told from the file):

    data.jsonl, data.json   EasyR1: {"prompt" or "problem": text with <image> tags, "answer": …, "images": [path, …]}
    folder/, data.zip       counting: main.csv with images_path, question, answer, beside images/

Every row is checked before a model is loaded. A row that cannot be used is counted and named and stops the run;
`skip_bad_rows` goes on without such rows, still naming them.
"""

import csv
import functools
import io
import json
import math
import pathlib
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import parallel
import rewards
from cli import UserError

Folder = pathlib.Path | zipfile.Path
ImageSource = str | Folder | bytes | dict | Image.Image

UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, zipfile.BadZipFile, zlib.error)
MOST_UNPACKED = 8 * 2**30  # bytes a ZIP may unpack to
TAG = "<image>"  # where an image goes in a prompt; the tokenizer's own placeholder never appears in data
COUNT_SYSTEM = "Count the objects. Reply: A photo of [NUMBER] [OBJECT_TYPE]"
THINK_ANSWER = (
    "{{ content }}\n\nReason first, then answer, as <think>reasoning</think><answer>answer</answer> and nothing else."
)
TASKS = {  # task: (system prompt or None, template of the user's turn)
    "count": (COUNT_SYSTEM, "{{ content }}"),
    "vqa": (None, THINK_ANSWER),
}


@dataclass
class Sample:
    """One row of a data set."""

    prompt: str
    """the question, with one <image> tag for each image"""
    answer: str
    """the gold answer"""
    images: list[ImageSource]
    """where each image is, or the image itself; decoded when it is needed"""
    source: str
    """file and row, for messages"""
    fields: dict[str, Any] = field(default_factory=dict)
    """every other column, handed to the rewards by name"""


@dataclass
class Prompt:
    """A sample as the sampler and the trainer take it."""

    ids: Tensor
    """(S,) token ids, images expanded: the trainer's"""
    engine_ids: list[int]
    """the same with one placeholder for each image: the sampler's"""
    positions: Tensor
    """(R, S) positions as the model counts them: 3 rows with M-RoPE, else 1"""
    images: list[Image.Image] = field(default_factory=list)
    """fitted, in order"""
    vision: dict[str, Tensor] = field(default_factory=dict)
    """what the vision tower takes: `pixel_values` (patches, patch values), `image_grid_thw` (images, 3); empty without
    images"""


@dataclass
class Rollout:
    """One completion, and what the step learns about it on the way."""

    ids: Tensor
    """(L,) token ids, the stop token included when one was sampled"""
    sampler_logp: Tensor
    """(L,) log-probability of each token under the distribution it was drawn from, temperature and top-p included"""
    truncated: bool = False
    """it ran into the length limit before a stop token"""
    text: str = ""
    """the decoded tokens, without the stop token"""
    reward: float = math.nan
    """NaN: no verdict, left out of its group"""
    advantage: float = 0.0
    weight: float = 0.0
    """of each of its tokens in the loss, from `token_weights`"""
    old_logp: Tensor | None = None
    """(L,) under the policy that sampled it, when that is no longer the policy"""
    ref_logp: Tensor | None = None
    """(L,) under the reference, when there is a KL term"""


@dataclass
class Processor:
    """What turns a sample into a prompt: tokenizer, image processor, template and image limits."""

    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil | None
    skeleton: PreTrainedModel
    """the model without weights, for the positions it gives to tokens"""
    system: str | None
    template: jinja2.Template
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """The multiple that image sides are fitted to: patch times merge, 28 for Qwen2-VL and Qwen2.5-VL."""
        return self.image_processor.patch_size * self.image_processor.merge_size

    @functools.cached_property
    def control_tokens(self) -> list[str]:
        """The tokenizer's special tokens: in a question they would end its turn or stand for a picture."""
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    @property
    def image_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids("<|image_pad|>")


def load_processor(
    model: str, task: str, template: str | None = None, min_pixels: int = 3136, max_pixels: int = 1003520
) -> Processor:
    """The tokenizer and image processor saved beside `model`, with the task's template or the jinja file `template`.

    Raises UserError when `model` is not there or has no chat template.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        image_processor = None
        if hasattr(config, "vision_config"):
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    except (OSError, ValueError) as error:
        if pathlib.Path(model).is_dir():
            raise UserError(
                f"{model!r} is not a whole model folder in Hugging Face layout ({str(error).splitlines()[0][:160]})"
            ) from None
        raise UserError(
            f"no model at {model!r}: give --model a folder in Hugging Face layout, or a hub name with the hub within "
            "reach; `python tiny.py` builds a small one"
        ) from None
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {model!r} has no chat template: use an instruction-tuned model")
    system, text = TASKS[task] if template is None else (None, read_text(template, "--template"))
    processor = Processor(
        tokenizer, image_processor, _skeleton(config), system, _template(text, template), min_pixels, max_pixels
    )
    if image_processor is not None and max_pixels < processor.factor**2:
        raise UserError(
            f"--max_pixels {max_pixels} is less than one token takes: {processor.factor} x {processor.factor}"
        )
    return processor


def _template(text: str, path: str | None) -> jinja2.Template:
    try:
        template = jinja2.Template(text, undefined=jinja2.StrictUndefined)
        shown = template.render(content=(mark := "one question"))
    except jinja2.TemplateError as error:
        raise UserError(f"--template {path}: {error}") from None
    if mark not in shown:
        raise UserError(f"--template {path} leaves the question out: it needs {{{{ content }}}}")
    return template


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The architecture of `config` cut to one layer, on the meta device: it counts positions and holds no memory."""
    for part in (config, getattr(config, "text_config", None)):
        if hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
            if getattr(part, "layer_types", None):
                part.layer_types = part.layer_types[:1]
    with torch.device("meta"):
        return AutoModel.from_config(config)


def prompt_positions(model: PreTrainedModel, ids: Tensor, vision: dict[str, Tensor]) -> Tensor:
    """(R, S) positions of a prompt as `model` itself counts them: M-RoPE where it has it, else 0, 1, 2, ..."""
    if not hasattr(model, "get_rope_index"):
        return torch.arange(len(ids))[None]
    is_image = (ids == model.config.image_token_id).int()
    grid = vision.get("image_grid_thw")
    return model.get_rope_index(ids[None], image_grid_thw=grid, mm_token_type_ids=is_image[None])[0][:, 0]


def read_text(path: str | Folder, flag: str) -> str:
    """The UTF-8 text of a file that the user named; raises UserError naming `flag` when it cannot be read."""
    try:
        return (pathlib.Path(path) if isinstance(path, str) else path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {str(path)!r} ({error}): check {flag}") from None


# --- images -----------------------------------------------------------------------------------------------------------


def decode_image(source: ImageSource) -> Image.Image:
    """`source` as upright 8-bit RGB. Raises ValueError when it is not a whole image, OSError when it is not there.

    EXIF orientation is applied and transparency goes on white. 16-bit and float scans are stretched from their darkest
    to their brightest value, since clipping them to 8 bit would leave a white sheet.
    """
    if isinstance(source, dict):
        source = source.get("bytes") if source.get("bytes") is not None else source.get("path")
    if source is None:
        raise ValueError("it has neither bytes nor a path")
    try:
        image = source if isinstance(source, Image.Image) else Image.open(_as_file(source))
        image = ImageOps.exif_transpose(image)
        image.load()
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise ValueError(f"not a readable image ({str(error)[:80]})") from None
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        values = np.asarray(image, dtype=np.float64)
        low, high = np.nanmin(values), np.nanmax(values)
        scaled = (np.nan_to_num(values, nan=low) - low) * (255 / max(high - low, 1e-12))
        image = Image.fromarray(scaled.round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _as_file(source: str | Folder | bytes) -> str | pathlib.Path | io.BytesIO:
    if isinstance(source, zipfile.Path):
        source = source.read_bytes()
    return io.BytesIO(source) if isinstance(source, bytes) else source


def fitted_size(height: int, width: int, min_pixels: int, max_pixels: int, factor: int = 28) -> tuple[int, int]:
    """(height, width) as multiples of `factor` with height·width within the limits and the aspect kept.

    The same sizes as Qwen2-VL's own resizing where that one stays within the limits. Raises ValueError for pictures
    more than 200 times as long as wide, which the models refuse.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"the picture is {width}x{height}: its sides differ by more than 200 times")
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * grow / factor) * factor for side in (height, width))
    # Where both limits cannot hold, or a thin picture's short side is at the minimum already, the upper limit does.
    h = max(factor, min(h, max_pixels // w // factor * factor))
    w = max(factor, min(w, max_pixels // h // factor * factor))
    return h, w


def fit_image(source: ImageSource, min_pixels: int, max_pixels: int, factor: int = 28) -> Image.Image:
    """Decode `source` and resize it once (bicubic) to `fitted_size`."""
    image = decode_image(source)
    h, w = fitted_size(image.height, image.width, min_pixels, max_pixels, factor)
    return image if image.size == (w, h) else image.resize((w, h), Image.Resampling.BICUBIC)


# --- prompts ----------------------------------------------------------------------------------------------------------


def encode_prompt(sample: Sample, processor: Processor) -> Prompt:
    """Token ids, fitted images and vision inputs of `sample`.

    Raises ValueError naming the row when placeholders and images do not match.
    """
    engine_ids = _engine_ids(sample, processor)
    if not sample.images:
        ids = torch.tensor(engine_ids)
        return Prompt(ids, engine_ids, prompt_positions(processor.skeleton, ids, {}))
    limits = (processor.min_pixels, processor.max_pixels, processor.factor)
    images = [fit_image(source, *limits) for source in sample.images]
    vision = dict(processor.image_processor(images=images, do_resize=False, return_tensors="pt"))
    counts = (vision["image_grid_thw"].prod(-1) // processor.image_processor.merge_size**2).tolist()
    ids = _expand(engine_ids, processor.image_token_id, counts)
    return Prompt(ids, engine_ids, prompt_positions(processor.skeleton, ids, vision), images, vision)


def _engine_ids(sample: Sample, processor: Processor) -> list[int]:
    for token in processor.control_tokens:
        if token in sample.prompt:
            raise ValueError(f"{token} stands in the question, where it would act as a control token")
    text = processor.template.render(content=sample.prompt)  # the question is data: it is never rendered itself
    content: str | list[dict] = text
    if sample.images:
        content = []
        for i, part in enumerate(text.split(TAG)):
            content += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": part}] * bool(part)
    messages = [{"role": "system", "content": processor.system}] * bool(processor.system)
    messages.append({"role": "user", "content": content})
    chat = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = processor.tokenizer(chat, add_special_tokens=False).input_ids
    if (found := ids.count(processor.image_token_id)) != len(sample.images):
        raise ValueError(
            f"{sample.source}: {len(sample.images)} images but {found} image placeholders once the prompt is in its "
            f"template: a template or question with {TAG} or a special token in it?"
        )
    return ids


def _expand(ids: list[int], image_token_id: int, counts: list[int]) -> Tensor:
    remaining = iter(counts)
    repeats = torch.tensor([next(remaining) if token == image_token_id else 1 for token in ids])
    return torch.repeat_interleave(torch.tensor(ids), repeats)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_samples(
    path: str,
    task: str,
    image_dir: str | None = None,
    processor: Processor | None = None,
    max_prompt_length: int | None = None,
    skip_bad_rows: bool = False,
) -> list[Sample]:
    """Every usable row of `path`, checked: tags, images (decoded and let go again), answers, prompt lengths.

    With a `processor`, prompts are counted with their expanded image tokens and those over `max_prompt_length` are bad
    rows. Duplicate rows are named but kept. Raises UserError when a row is bad (unless `skip_bad_rows`) or none is
    left.
    """
    rows = list(_read(pathlib.Path(path), image_dir))
    check = functools.partial(_check, task=task, processor=processor, max_prompt_length=max_prompt_length)
    with ThreadPoolExecutor() as pool:  # image decoding leaves the interpreter lock
        checked = pool.map(check, rows)
        problems = list(tqdm(checked, f"checking {path}", len(rows), unit="row", delay=3, disable=None))
    good = [row for row, problem in zip(rows, problems) if problem is None]
    bad = [f"{_source(row)}: {problem}" for row, problem in zip(rows, problems) if problem is not None]
    if bad and not skip_bad_rows:
        raise UserError(
            f"{_named(bad, f'of {len(rows)} rows cannot be used')}; mend them or pass --skip_bad_rows to go on without"
        )
    if bad and parallel.is_main():
        print(f"skipped: {_named(bad, f'of {len(rows)} rows')}", file=sys.stderr)
    if not good:
        raise UserError(f"{path}: no usable row")
    seen: dict[tuple, str] = {}
    again = []
    for sample in good:
        key = (sample.prompt, sample.answer, *map(_image_key, sample.images))
        if (first := seen.setdefault(key, sample.source)) != sample.source:
            again.append(f"{sample.source} repeats {first}")
    if again and parallel.is_main():
        print(f"note: {_named(again, 'duplicate rows')}", file=sys.stderr)
    return good


def _named(problems: list[str], what: str, most: int = 5) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return f"{len(problems)} {what}: " + "; ".join(problems[:most]) + more


def _source(row: "Sample | tuple[str, str]") -> str:
    return row.source if isinstance(row, Sample) else row[0]


def _image_key(source: ImageSource) -> object:
    return str(source) if isinstance(source, str | Folder) else id(source)


def _read(path: pathlib.Path, image_dir: str | None) -> Iterator["Sample | tuple[str, str]"]:
    """Rows in file order: a Sample, or (source, problem) for a row without the shape of one."""
    if path.is_dir() and (path / "main.csv").is_file():
        yield from _read_counting_folder(path, pathlib.Path(image_dir) if image_dir is not None else path)
    elif path.suffix.lower() == ".zip" and path.is_file():
        folder = open_zip(path)
        yield from _read_counting_folder(folder, folder)
    elif path.suffix in (".jsonl", ".json") and path.is_file():
        yield from _read_json(path, pathlib.Path(image_dir) if image_dir is not None else path.parent)
    elif not path.exists():
        raise UserError(f"no data at {str(path)!r}: give a .jsonl or .json file, or a folder or .zip with main.csv")
    else:
        raise UserError(f"{str(path)!r} is neither a .jsonl or .json file nor a folder or .zip with main.csv")


def _read_json(path: pathlib.Path, image_dir: pathlib.Path) -> Iterator["Sample | tuple[str, str]"]:
    text = read_text(path, "--data")
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error})") from None
        if not isinstance(rows, list):
            raise UserError(f"{path} is not a JSON list of rows")
        for number, row in enumerate(rows, 1):
            yield _easyr1_sample(row, f"{path} row {number}", image_dir)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        source = f"{path} row {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            yield source, f"not JSON ({error})"
            continue
        yield _easyr1_sample(row, source, image_dir)


def _easyr1_sample(row: object, source: str, image_dir: pathlib.Path) -> "Sample | tuple[str, str]":
    if not isinstance(row, dict):
        return source, "not a JSON object"
    row = dict(row)
    prompt = row.pop("prompt", None) or row.pop("problem", None)
    if not isinstance(prompt, str) or not prompt.strip():
        return source, f"no text under «prompt» or «problem» (columns: {', '.join(row)})"
    answer = row.pop("answer", None)
    images = row.pop("images", None) or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        return source, "«images» is not a list of paths"
    if not isinstance(answer, str | int | float | None):
        return source, f"«answer» is neither text nor a number: {str(answer)[:40]}"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in prompt + str(answer)):
        return source, "a broken character (half of a surrogate pair) in prompt or answer"
    return _tagged(prompt, answer, [image_dir / image for image in images], source, row)


def open_zip(path: pathlib.Path) -> zipfile.Path:
    """The folder with main.csv in a ZIP: its root, or one folder down. It is read where it is and never unpacked.

    Raises UserError for what is no ZIP, has no main.csv, would unpack to more than `MOST_UNPACKED` bytes, is encrypted,
    or holds paths that leave the folder, or links.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable ZIP ({error})") from None
    for member in archive.infolist():
        parts = member.filename.replace("\\", "/").split("/")
        if parts[0] in ("",) or ".." in parts or ":" in parts[0]:
            raise UserError(f"{path}: the path {member.filename!r} leaves the folder; pack it anew without it")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"{path}: {member.filename!r} is a link; pack the file itself")
        if member.flag_bits & 1:
            raise UserError(f"{path}: {member.filename!r} is encrypted; pack it without a password")
    if (total := sum(member.file_size for member in archive.infolist())) > MOST_UNPACKED:
        raise UserError(f"{path} would unpack to {total / 2**30:.1f} GiB; at most {MOST_UNPACKED / 2**30:.0f} are read")
    root = zipfile.Path(archive)
    for folder in (root, *sorted(root.iterdir(), key=str)):
        if folder.is_dir() and folder.name != "__MACOSX" and (folder / "main.csv").is_file():
            return folder
    raise UserError(f"{path} has no main.csv, neither at its root nor one folder down")


def _read_counting_folder(folder: Folder, image_dir: Folder) -> Iterator["Sample | tuple[str, str]"]:
    path = folder / "main.csv"
    reader = csv.DictReader(io.StringIO(read_text(path, "--data")), strict=True)
    missing = {"images_path", "question", "answer"} - set(reader.fieldnames or [])
    if missing:
        found = ", ".join(reader.fieldnames or []) or "none"
        raise UserError(f"{path} has no column {', '.join(sorted(missing))}; its first line names: {found}")
    for number, row in enumerate(_csv_rows(reader, path), 2):  # row 1 is the header, as a spreadsheet shows it
        source = f"{path} row {number}"
        if None in row or None in row.values():
            yield source, "more or fewer cells than the first line names"
            continue
        name = row.pop("images_path").strip()
        if not name:
            yield source, "images_path is empty"
            continue
        image = image_dir / name if (image_dir / name).exists() else image_dir / "images" / name
        yield _tagged(row.pop("question"), row.pop("answer"), [image], source, row)


def _csv_rows(reader: csv.DictReader, path: Folder) -> Iterator[dict]:
    try:
        yield from reader
    except csv.Error as error:  # a stray quote would swallow the rows after it
        raise UserError(f"{path}, in the row after line {reader.line_num}: a stray quote? ({error})") from None


def _tagged(prompt: str, answer: object, images: list, source: str, fields: dict) -> "Sample | tuple[str, str]":
    """A row with images and no tag gets them in front; any other difference between tags and images is a problem."""
    if "completion" in fields:
        return source, "a column named «completion», which is what rewards call the model's own text; rename it"
    tags = prompt.count(TAG)
    if images and not tags:
        prompt = TAG * len(images) + prompt
    elif tags != len(images):
        return source, f"{tags} {TAG} tags in the prompt but {len(images)} images"
    return Sample(prompt, "" if answer is None else str(answer), images, source, fields)


def _check(
    row: "Sample | tuple[str, str]", task: str, processor: Processor | None, max_prompt_length: int | None
) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, Sample):
        return row[1]
    if problem := rewards.gold_problem(task, row.answer):
        return problem
    sizes = []
    for image in row.images:
        try:
            sizes.append(decode_image(image).size)
        except FileNotFoundError:
            return f"no image at {image}"
        except ValueError as error:
            return f"image {image}: {error}"
    if processor is None:
        return None
    if row.images and processor.image_processor is None:
        return "it has an image, but the model is text-only"
    try:
        length = len(_engine_ids(row, processor))
        for width, height in sizes:
            h, w = fitted_size(height, width, processor.min_pixels, processor.max_pixels, processor.factor)
            length += h * w // processor.factor**2 - 1
    except ValueError as error:
        return str(error)
    if max_prompt_length is not None and length > max_prompt_length:
        return f"its prompt has {length} tokens, images expanded; --max_prompt_length is {max_prompt_length}"
    return None


# --- order ------------------------------------------------------------------------------------------------------------


def row_at(place: int, rows: int, seed: int) -> int:
    """The row at `place` of an endless stream that goes through all rows in a new order each time."""
    epoch, index = divmod(place, rows)
    return int(_order(rows, seed, epoch)[index])


@functools.lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def prompt_seed(seed: int, place: int) -> int:
    """The sampling seed of the prompt at `place` of the stream: its completions follow from it alone."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
