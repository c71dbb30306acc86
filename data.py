"""Samples and prompts; formats.py reads the rows, images.py the pictures, stream.py says which rows come when.

    python data.py convert --input_jsonl vqa_rad.jsonl --output_jsonl train.jsonl --image_dir images

One picture, one set of tokens: the sampler gets a prompt with one placeholder for each image; the trainer gets the same
prompt with every image expanded to its tokens.

Every row is checked before a model is loaded. A row that cannot be used is counted and named and stops the run;
`skip_bad_rows` goes on without such rows, still naming them. `convert` writes any format as EasyR1 JSONL.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import jinja2
import torch
import transformers
import tyro
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import rewards
from common import cli, console, distributed
from common.errors import UserError
from common.records import TAG, Folder, ImageSource, Prompt, Sample
from config import Columns, DataFlags
from inputs.images import check_image, fit_image, fitted_size, read_source
from inputs.rows import Cell, Row, data_sets, easyr1_row, read_rows, read_text
from rewards import TASKS


@dataclass
class Processor:
    """What turns a sample into a prompt: tokenizer, image processor, template and image limits."""

    tokenizer: transformers.PreTrainedTokenizerBase
    image_processor: transformers.Qwen2VLImageProcessorPil | None
    skeleton: transformers.PreTrainedModel
    """the model without weights, for the positions it gives to tokens"""
    system: str | None
    template: jinja2.Template
    min_pixels: int
    max_pixels: int
    max_side: int = 0

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """What `fitted_size` takes after the sides."""
        return self.min_pixels, self.max_pixels, self.factor, self.max_side

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
    model: str,
    task: str,
    template: str | None = None,
    min_pixels: int = 3136,
    max_pixels: int = 1003520,
    max_side: int = 0,
) -> Processor:
    """The tokenizer and image processor saved beside `model`, with the task's template or the jinja file `template`.

    Raises UserError when `model` is not there or has no chat template.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        image_processor = None
        if hasattr(config, "vision_config"):
            image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(model)
    except (OSError, ValueError) as error:
        if (pathlib.Path(model) / "adapter_config.json").is_file():
            raise UserError(f"{model!r} is an adapter: give its base as --model, and it as --adapter") from None
        if pathlib.Path(model).is_dir():
            raise UserError(
                f"{model!r} is not a whole model folder in Hugging Face layout ({str(error).splitlines()[0][:160]})"
            ) from None
        raise UserError(
            f"no model at {model!r}: give --model a folder in Hugging Face layout, or a hub name with the hub within "
            "reach; `python -m demo.tiny` builds a small one"
        ) from None
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {model!r} has no chat template: use an instruction-tuned model")
    system, text = TASKS[task] if template is None else (None, read_text(template, "--template"))
    limits = (min_pixels, max_pixels, max_side)
    processor = Processor(tokenizer, image_processor, _skeleton(config), system, _template(text, template), *limits)
    if image_processor is not None and max_pixels < processor.factor**2:
        raise UserError(
            f"--max_pixels {max_pixels} is less than one token takes: {processor.factor} x {processor.factor}"
        )
    if image_processor is not None and 0 < max_side < processor.factor:
        raise UserError(f"--max_side {max_side} is less than one token takes: {processor.factor}")
    return processor


def make_processor(flags: DataFlags, model: str, task: str) -> Processor:
    """`load_processor` with these flags."""
    return load_processor(model, task, flags.template, flags.min_pixels, flags.max_pixels, flags.max_side)


def _template(text: str, path: str | None) -> jinja2.Template:
    try:
        template = jinja2.Template(text, undefined=jinja2.StrictUndefined)
        shown = template.render(content=(mark := "one question"))
    except jinja2.TemplateError as error:
        raise UserError(f"--template {path}: {error}") from None
    if mark not in shown:
        raise UserError(f"--template {path} leaves the question out: it needs {{{{ content }}}}")
    return template


def _skeleton(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """The architecture of `config` cut to one layer, on the meta device: it counts positions and holds no memory."""
    for part in (config, getattr(config, "text_config", None)):
        if hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
            if getattr(part, "layer_types", None):
                part.layer_types = part.layer_types[:1]
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def prompt_positions(model: transformers.PreTrainedModel, ids: Tensor, vision: dict[str, Tensor]) -> Tensor:
    """(R, S) positions of a prompt as `model` itself counts them: M-RoPE where it has it, else 0, 1, 2, ..."""
    if not hasattr(model, "get_rope_index"):
        return torch.arange(len(ids))[None]
    is_image = (ids == model.config.image_token_id).int()
    grid = vision.get("image_grid_thw")
    return model.get_rope_index(ids[None], image_grid_thw=grid, mm_token_type_ids=is_image[None])[0][:, 0]


# --- prompts ----------------------------------------------------------------------------------------------------------


def encode_prompt(sample: Sample, processor: Processor) -> Prompt:
    """Token ids, fitted images and vision inputs of `sample`.

    Raises ValueError naming the row when placeholders and images do not match.
    """
    engine_ids = _engine_ids(sample, processor)
    if not sample.images:
        ids = torch.tensor(engine_ids)
        return Prompt(ids, engine_ids, prompt_positions(processor.skeleton, ids, {}), source=sample.source)
    images = [_fitted(source, sample, processor) for source in sample.images]
    vision = dict(processor.image_processor(images=images, do_resize=False, return_tensors="pt"))
    counts = (vision["image_grid_thw"].prod(-1) // processor.image_processor.merge_size**2).tolist()
    ids = _expand(engine_ids, processor.image_token_id, counts)
    positions = prompt_positions(processor.skeleton, ids, vision)
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(b"%d x %d:" % image.size + image.tobytes())
    token = processor.image_token_id
    return Prompt(
        ids, engine_ids, positions, images, vision, sample.source, image_token=token, image_digest=digest.digest()
    )


def encode_prompts(samples: Sequence[Sample], processor: Processor) -> list[Prompt]:
    """`encode_prompt` of each, in threads: most of the work is on pictures and leaves the interpreter lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda sample: encode_prompt(sample, processor), samples))


def _fitted(source: ImageSource, sample: Sample, processor: Processor) -> Image.Image:
    try:
        return fit_image(source, *processor.limits)
    except (OSError, ValueError) as error:  # it was whole when the row was loaded
        raise UserError(
            f"{sample.source}: image {source}: {error}; it was readable at the start: put it back"
        ) from None


def _engine_ids(sample: Sample, processor: Processor) -> list[int]:
    for token in processor.control_tokens:
        if token in sample.prompt or token in (sample.system or ""):
            raise ValueError(f"{token} stands in the question, where it would act as a control token")
    text = processor.template.render(content=sample.prompt)  # the question is data: it is never rendered itself
    content: str | list[dict] = text
    if sample.images:
        content = []
        for i, part in enumerate(text.split(TAG)):
            content += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": part}] * bool(part)
    system = sample.system or processor.system
    messages = [{"role": "system", "content": system}] * bool(system)
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
    data: str,
    task: str | None,
    image_dir: str | None = None,
    processor: Processor | None = None,
    max_prompt_length: int | None = None,
    skip_bad_rows: bool = False,
    columns: Columns | None = None,
    keep_repeats: bool = False,
) -> list[Sample]:
    """Every usable row of `data`, checked: tags, images (looked through and let go again), answers, prompt lengths.

    With a `processor`, prompts are counted with their expanded image tokens and those over `max_prompt_length` are bad
    rows. Repeated rows are named, and left out with `skip_bad_rows` unless `keep_repeats`, as a test set's are. Without
    a `task`, golds are only looked at for being there. Raises UserError when a row is bad (unless `skip_bad_rows`) or
    none is left. Every process calls it and checks its share of the rows.
    """
    rows = list(read_rows(data, image_dir, columns))
    return validate_rows(rows, data, task, processor, max_prompt_length, skip_bad_rows, keep_repeats)


def load_split(
    flags: DataFlags, data: str, task: str, processor: Processor, keep_repeats: bool = False
) -> list[Sample]:
    """`load_samples` of `data` with these flags."""
    columns = Columns(flags.prompt_column, flags.answer_column, flags.image_column)
    return load_samples(
        data,
        task,
        flags.image_dir,
        processor,
        flags.max_prompt_length,
        flags.skip_bad_rows,
        columns,
        keep_repeats,
    )


def validate_rows(
    rows: list[Row],
    data: str,
    task: str | None,
    processor: Processor | None,
    max_prompt_length: int | None,
    skip_bad_rows: bool,
    keep_repeats: bool,
) -> list[Sample]:
    """What `load_samples` keeps of the `rows` that were read from `data`, and says of the others."""
    check = functools.partial(_check, task=task, processor=processor, max_prompt_length=max_prompt_length, seen={})
    with ThreadPoolExecutor() as pool:  # image decoding leaves the interpreter lock
        mine = distributed.shard(rows)
        checked = list(console.progress(pool.map(check, mine), f"checking {data}", total=len(mine), unit="row"))
    results = distributed.gather_shards(checked)
    good = [(replace(row, tokens=n), key) for row, (problem, key, n) in zip(rows, results) if problem is None]
    bad = [f"{_source(row)}: {problem}" for row, (problem, *_) in zip(rows, results) if problem is not None]
    if bad and not skip_bad_rows:
        raise UserError(
            f"{_named(bad, f'of {len(rows)} rows cannot be used')}; mend them or pass --skip_bad_rows to go on without"
        )
    if bad and console.is_main():
        print(f"skipped: {_named(bad, f'of {len(rows)} rows')}", file=sys.stderr)
    parts = {sample.source_index for sample, _ in good}
    if empty := [spec for part, spec in enumerate(data_sets(data)) if part not in parts]:
        raise UserError(f"{', '.join(empty)}: no usable row")
    first: dict[str, Sample] = {}
    again = []
    for sample, key in good:
        if (earlier := first.setdefault(key, sample)) is not sample:
            again.append(f"{sample.source} repeats {earlier.source}")
    leave_out = skip_bad_rows and not keep_repeats
    if again and console.is_main():
        kept = "left out" if leave_out else "kept" if keep_repeats else "kept; --skip_bad_rows leaves them out"
        print(f"note: {_named(again, f'duplicate rows ({kept})')}", file=sys.stderr)
    return list(first.values()) if leave_out else [sample for sample, _ in good]


def max_images(samples: list[Sample]) -> int:
    """The pictures of the sample with most of them, at least 1."""
    return max(1, *(len(sample.images) for sample in samples))


def _named(problems: list[str], what: str, most: int = 5) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return f"{len(problems)} {what}: " + "; ".join(problems[:most]) + more


def _source(row: Row) -> str:
    return row.source if isinstance(row, Sample) else row[0]


def _check(
    row: Row, task: str | None, processor: Processor | None, max_prompt_length: int | None, seen: dict
) -> tuple[str | None, str, int]:
    """What is wrong with a row, or None; what it is recognised by when it comes again; and the tokens of its prompt.
    `seen`: images so far."""
    if not isinstance(row, Sample):
        return row[1], "", 0
    if problem := rewards.gold_problem(task, row.answer):
        return problem, "", 0
    try:
        images = [_inspect_zip(image, seen) for image in row.images]
        tokens = 0
        if processor is not None:
            tokens = _checked_length(row, processor, max_prompt_length, [seen[image] for image in images])
    except ValueError as error:
        return str(error), "", 0
    known = json.dumps([row.prompt, row.answer, row.system, *images])
    return None, hashlib.sha1(known.encode()).hexdigest(), tokens


def _inspect_zip(source: ImageSource, seen: dict[str, tuple[int, int]]) -> str:
    """What an image is recognised by, once it is known to be whole and its (height, width) are in `seen`."""
    try:
        content = read_source(source)
        name = hashlib.sha1(content).hexdigest() if isinstance(content, bytes) else str(content)
        name = str(id(content)) if isinstance(content, Image.Image) else name
        if name not in seen:
            seen[name] = check_image(content)
    except FileNotFoundError:
        raise ValueError(f"no image at {source}") from None
    except ValueError as error:
        raise ValueError(f"image {source if isinstance(source, str | Folder | Cell) else ''}: {error}") from None
    return name


def _checked_length(
    sample: Sample, processor: Processor, max_prompt_length: int | None, sizes: list[tuple[int, int]]
) -> int:
    if sample.images and processor.image_processor is None:
        raise ValueError("it has an image, but the model is text-only")
    length = len(_engine_ids(sample, processor))
    for height, width in sizes:
        h, w = fitted_size(height, width, *processor.limits)
        length += h * w // processor.factor**2 - 1
    if max_prompt_length is not None and length > max_prompt_length:
        raise ValueError(f"its prompt has {length} tokens, images expanded; --max_prompt_length is {max_prompt_length}")
    return length


# --- command ----------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """Write a data set of any format as EasyR1 JSONL."""

    command: tyro.conf.Positional[Literal["convert"]]
    """The one thing to do."""
    input_jsonl: str
    """A data set in any format that training reads: VQA-RAD conversations, a parquet file, a ZIP, a hub name, ..."""
    output_jsonl: str
    """The file to write; pictures that are no files on disk become files in a folder beside it."""
    image_dir: str | None = None
    """What relative image paths start from; the input's folder when left out."""
    task: Literal["count", "math", "vqa"] | None = None
    """Check the gold answers for this task; only that there are some when left out."""
    prompt_column: str | None = None
    """The prompt's column, where it has another name than usual."""
    answer_column: str | None = None
    """The gold answer's column, where it has another name than usual."""
    image_column: str | None = None
    """The images' column, where it has another name than usual."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and repeated ones, instead of stopping; they are named either way."""
    overwrite: bool = False
    """Replace `output_jsonl`."""


def convert(cfg: Config) -> int:
    """Write the rows of one data set as EasyR1 JSONL, whole or not at all; returns how many."""
    output = pathlib.Path(cfg.output_jsonl)
    if output.exists() and not cfg.overwrite:
        raise UserError(f"{cfg.output_jsonl!r} is there already: choose another --output_jsonl or pass --overwrite")
    columns = Columns(cfg.prompt_column, cfg.answer_column, cfg.image_column)
    samples = load_samples(cfg.input_jsonl, cfg.task, cfg.image_dir, None, None, cfg.skip_bad_rows, columns)
    partial = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            for number, sample in enumerate(tqdm(samples, "writing", unit="row", delay=3, disable=None), 1):
                file.write(json.dumps(easyr1_row(sample, output, number), ensure_ascii=False, default=str) + "\n")
        partial.rename(output)
    except OSError as error:
        raise UserError(f"cannot write {cfg.output_jsonl!r} ({error})") from None
    return len(samples)


def main(cfg: Config) -> None:
    print(f"{cfg.output_jsonl}: {convert(cfg)} rows")


if __name__ == "__main__":
    cli.run(main, Config)
