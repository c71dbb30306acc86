"""Load and check samples, and encode them as prompts.

    python data.py convert --input_jsonl vqa_rad.jsonl --output_jsonl train.jsonl --image_dir images
    python data.py show --row 3 --task vqa --data train.jsonl    # the prompt as the model gets it
    python data.py overlap train.jsonl test.jsonl                # pictures and questions that both have

Rows are read in `inputs/rows.py`. Images are checked and decoded in `inputs/images.py`. `training/prompt_stream.py`
decides the order in which the rows are used. Every row is checked before a model is loaded.

The sampler and the trainer use the same image tokens. The sampler gets a prompt with one placeholder for each image.
The trainer gets the same prompt with each image expanded to its tokens.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import jinja2
import torch
import transformers
from PIL import Image
from torch import Tensor

import rewards
from common import cli, console, distributed
from common.errors import UserError
from common.parts import extra
from common.records import TAG, AnyPath, Cell, ImageSource, Prompt, Sample, Turn
from common.templates import (
    answer_end,
    control_tokens,
    parse_template,
    read_template,
    template_variables,
    write_chat,
)
from config import Columns, DataFlags
from inputs.images import check_image, fit_image, read_source
from inputs.rows import Problem, data_sets, read_rows
from policy.base_files import reading
from policy.families import Family, ImageLimits, ImagePreparation, ImageProcessor, find_family, load_preprocessors
from policy.model import read_config

TEXTS_KEPT = 1000  # with their token ids, in memory


@dataclass
class Processor:
    """Everything that turns a sample into a prompt: tokenizer, image processor, template and image limits."""

    tokenizer: transformers.PreTrainedTokenizerBase
    family: Family
    image_processor: ImageProcessor | None  # None: the model is text-only
    preparation: ImagePreparation | None  # how images are prepared, within the limits of the flags
    skeleton: transformers.PreTrainedModel  # the model without weights, used to compute token positions
    system: str | None
    template: jinja2.Template
    chat_variables: dict[str, Any]  # variables of the chat template that --chat_template_kwargs sets, and `tools`
    environment: Any = None  # with `--env`, its `parts.turns.environment.RunEnvironment`
    kept: dict[tuple, tuple] = field(default_factory=dict, init=False)  # what `_encode_text` has returned

    @functools.cached_property
    def control_tokens(self) -> list[str]:
        """The tokenizer's special tokens. In a question, such a token would end the turn or stand for an image."""
        return control_tokens(self.tokenizer)

    @functools.cached_property
    def longest_token(self) -> int:
        """Length of the longest token in characters. A text of n tokens has at most n times as many characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def image_token_id(self) -> int:
        """The token that stands for an image; −1 if the model is text-only."""
        return self.tokenizer.convert_tokens_to_ids(self.family.vision.token) if self.family.vision else -1

    def vision_inputs(self, images: list[Image.Image]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for `images`, which are fitted already."""
        prepared = self.image_processor(images=images, return_tensors="pt", **self.preparation.options)
        return self.family.vision.inputs(prepared)

    def image_ids(self, tokens: int) -> list[int]:
        """Return the trainer's token ids of an image with this many tokens, which replace the sampler's placeholder."""
        text = self.family.vision.expansion.replace("{}", self.family.vision.token * tokens)
        return self.tokenizer(text, add_special_tokens=False).input_ids


def load_processor(
    model: str,
    task: str,
    template: str | None = None,
    min_pixels: int = DataFlags.min_pixels,
    max_pixels: int = DataFlags.max_pixels,
    chat_template_kwargs: Sequence[str] = (),
) -> Processor:
    """Load the tokenizer and image processor saved with `model`, without its weights.

    The prompt template is the Jinja file `template`, or the task's own template if `template` is None.
    """
    config = read_config(model)
    family, (tokenizer, image_processor) = find_family(config), load_preprocessors(model, config)
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {model!r} has no chat template: use an instruction-tuned model")
    system, user_turn = prompt_template(task, template)
    preparation = None
    if family.vision:
        limits = ImageLimits(min_pixels, max_pixels)
        with reading(model, "image processor"):
            preparation = family.vision.prepare_images(image_processor, config, limits)
            if 0 in image_processor.image_std:
                raise ValueError("image_std has a 0, by which pixels would be divided")
    with reading(model, "chat template"):
        variables = template_variables(chat_template_kwargs, tokenizer.chat_template)
    with reading(model, "config.json"):
        skeleton = _skeleton(config)
    return Processor(tokenizer, family, image_processor, preparation, skeleton, system, user_turn, variables)


def processor_for(cfg: Any, task: str | None = None) -> Processor:
    """Load the processor of `cfg.model` with the flags `cfg`, and with an environment if the flags name one."""
    names = ("min_pixels", "max_pixels", "chat_template_kwargs")
    processor = load_processor(cfg.model, task or cfg.task, cfg.template, **{x: getattr(cfg, x) for x in names})
    if cfg.env:
        from parts.turns import use_environment

        has_teacher = bool(getattr(cfg, "teacher", None))
        processor = use_environment(processor, cfg.env, cfg.max_turns, cfg.max_prompt_length, has_teacher)
    return processor


def prompt_template(task: str, path: str | None) -> tuple[str | None, jinja2.Template]:
    """Return the system message and the template of the user's turn: the task's or, with `path`, None and that file."""
    if path is not None:
        return None, read_template(path, "--template", ["content"])
    defaults = rewards.get_task(task)
    return defaults.system, parse_template(defaults.template, f"the template of --task {task}", ["content"])


def _skeleton(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """Build a one-layer model from `config` on the meta device, to compute token positions without using memory."""
    config = copy.deepcopy(config)
    for sub_config in (config, getattr(config, "text_config", None)):
        if hasattr(sub_config, "num_hidden_layers"):
            sub_config.num_hidden_layers = 1
            if getattr(sub_config, "layer_types", None):
                sub_config.layer_types = sub_config.layer_types[:1]
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def prompt_position_ids(model: transformers.PreTrainedModel, ids: Tensor, vision: dict[str, Tensor]) -> Tensor:
    """Return the (R, S) position ids of a prompt's S tokens, as `model` computes them.

    R is 3 for models with M-RoPE. For other models, it is 1, and the ids are 0, 1, 2, ...
    """
    if not hasattr(model, "get_rope_index"):
        return torch.arange(len(ids))[None]
    kinds, grid = (ids == model.config.image_token_id).int(), vision.get("image_grid_thw")
    return model.get_rope_index(ids[None], image_grid_thw=grid, mm_token_type_ids=kinds[None])[0][:, 0]


# --- prompts ----------------------------------------------------------------------------------------------------------


def encode_prompt(sample: Sample, processor: Processor, teacher: Processor | None = None) -> Prompt:
    """Compute the token ids, fitted images, vision inputs and position ids of `sample`; with a `teacher`, also for it.

    Raises ValueError if the question contains a control token, or if there is not one placeholder per image. Raises
    UserError, naming the row, if an image can no longer be read.
    """
    prompt = _encode(sample, processor)
    if teacher is processor and not sample.teacher_images:
        prompt.for_teacher = replace(prompt, images=[])  # a copy, which does not get the features of the policy's tower
    elif teacher:
        prompt.for_teacher = _encode(sample.for_teacher, teacher)
    return prompt


def _encode(sample: Sample, processor: Processor) -> Prompt:
    images = []
    for source in sample.images:
        try:
            images.append(fit_image(source, processor.preparation.fit))
        except (OSError, ValueError) as error:
            problem = f"image {str(source)[:200]}: {error}; it passed the check at the start: restore or replace it"
            raise UserError(f"{sample.source}: {problem}") from None
    vision = processor.vision_inputs(images) if images else {}
    prompt = Prompt(*_encode_text(sample, images, vision, processor), images, vision, sample.source)
    if images:
        prompt.image_token, prompt.image_digest = processor.image_token_id, digest_of(images)
    return prompt


def _encode_text(
    sample: Sample, images: list[Image.Image], vision: dict[str, Tensor], processor: Processor
) -> tuple[Tensor, list[int], Tensor, str]:
    """Return the ids, engine_ids, position_ids and opening of a `Prompt`, cached by its texts and image sizes."""
    key = (sample.system, *((turn.role, turn.text) for turn in sample.turns), *(image.size for image in images))
    if not (encoded := processor.kept.get(key)):
        engine_ids, opening = _engine_ids(sample, processor)
        ids = torch.tensor(expand_images(engine_ids, images, processor))
        if len(processor.kept) >= TEXTS_KEPT:
            processor.kept.clear()
        encoded = processor.kept[key] = ids, engine_ids, prompt_position_ids(processor.skeleton, ids, vision), opening
    return encoded


def digest_of(images: Sequence[Image.Image]) -> bytes:
    """Return a hash of the sizes and pixels of `images`."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(b"%d x %d:" % image.size + image.tobytes())
    return digest.digest()


def encode_response(sample: Sample, response: str, processor: Processor) -> Tensor:
    """Return the (L,) token ids of an answer to `sample`, and of the end that the chat template writes after it.

    The opening, which the prompt already has (`Prompt.opening`), is left out. Raises ValueError if the answer is empty,
    has a control token, lacks that opening, has a thought although the prompt has ended it, or gets no end token.
    """
    chat = write_chat(prompt_turns(sample, processor), processor.tokenizer, processor.chat_variables)
    space, end = answer_end(processor.tokenizer)
    if not response.strip() or not end:
        raise ValueError("its answer is empty" if end else "the chat template ends an answer with no control token")
    if any(token in response for token in processor.control_tokens):
        raise ValueError("its answer contains a control token: remove it")
    if opening := opening_of(chat, processor.control_tokens).strip():
        if not response.lstrip().startswith(opening):
            raise ValueError(f"its answer does not begin with {opening!r}, which the chat template opens")
        response = response.lstrip().removeprefix(opening).lstrip()
    if re.search(r"</think>\s*(?:<answer>\s*)?$", chat) and re.search("</?think>", response):
        raise ValueError("its answer has a thought, but the chat template has ended it: remove it, or allow thinking")
    answer, encode = response + space + end, functools.partial(processor.tokenizer, add_special_tokens=False)
    prompt, whole = encode(chat).input_ids, encode(chat + answer).input_ids
    # Encoded alone, an answer may begin with another token (SentencePiece: "▁3"), so its tokens in the chat are used.
    begins_anew = whole[: len(prompt)] == prompt  # else, one token of the chat spans the end of the prompt
    return torch.tensor(whole[len(prompt) :] if begins_anew else encode(answer).input_ids)


def expand_images(engine_ids: list[int], images: list[Image.Image], processor: Processor) -> list[int]:
    """Replace the placeholder of each image, in order, with the image's tokens."""
    remaining, ids = iter(images), []
    for token_id in engine_ids:
        if token_id == processor.image_token_id:
            image = next(remaining)
            ids += processor.image_ids(processor.preparation.count(image.height, image.width))
        else:
            ids.append(token_id)
    return ids


def encode_prompts(samples: Sequence[Sample], processor: Processor, teacher: Processor | None = None) -> list[Prompt]:
    """Call `encode_prompt` on each sample, in threads: most of the work is image processing, which releases the GIL."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda sample: encode_prompt(sample, processor, teacher), samples))


def prompt_turns(sample: Sample, processor: Processor) -> list[Turn]:
    """Return the turns of a prompt, with the template around the question. Raises ValueError for a control token."""
    for token in processor.control_tokens:
        if any(token in text for text in (*sample.texts, sample.system or processor.system or "")):
            raise ValueError(f"{token} appears in the question, where it would act as a control token: remove it")
    text = sample.prompt
    if not ("<think>" in text and "<answer>" in text):  # the question does not ask for the format itself
        text = processor.template.render(content=text)  # the question itself is never used as a template
    pieces = re.split(f"({TAG})", text) if sample.images else [text]  # the template may have moved images
    turns = [*sample.turns[:-1], Turn("user", [None if piece == TAG else piece for piece in pieces if piece])]
    tools = processor.environment.description if processor.environment else ""
    if system := "\n\n".join(filter(None, [sample.system or processor.system, tools])):
        turns.insert(0, Turn("system", [system]))
    return turns


def _engine_ids(sample: Sample, processor: Processor) -> tuple[list[int], str]:
    """Return the sampler's token ids, and `Prompt.opening`."""
    chat = write_chat(prompt_turns(sample, processor), processor.tokenizer, processor.chat_variables)
    ids = processor.tokenizer(chat, add_special_tokens=False).input_ids
    num_placeholders = ids.count(processor.image_token_id)
    if num_placeholders != len(sample.images):
        problem = f"{len(sample.images)} images but {num_placeholders} image placeholders in the templated prompt"
        raise ValueError(f"{problem}: does the template or the question contain {TAG} or a special token?")
    return ids, opening_of(chat, processor.control_tokens)


def opening_of(chat: str, control_tokens: list[str]) -> str:
    """Return the end of a prompt from a `<think>` or `<answer>` that is still open, else "".

    A tag before a control token does not count: such a token ends an earlier turn, and the tag is in that turn.
    """
    tag = re.search(r"<(?:think|answer)>(?!.*</?(?:think|answer)>)", chat, re.DOTALL)
    is_open = tag and not any(token in chat[tag.end() :] for token in control_tokens)
    return chat[tag.start() :] if is_open else ""


# --- loading ----------------------------------------------------------------------------------------------------------


def load_samples(
    data: str, task: str | None, image_dir: str | None = None, *, columns: Columns | None = None, **checks: Any
) -> list[Sample]:
    """Read the rows of `data` and return the usable ones. `checks` are optional arguments of `validate_rows`."""
    return validate_rows(list(read_rows(data, image_dir, columns)), data, task, **checks)


def load_split(
    flags: DataFlags, data: str, task: str | None, processor: Processor, keep_duplicates: bool = False
) -> list[Sample]:
    """Like `load_samples`, with the columns, the length limit and `skip_bad_rows` from `flags`."""
    rows = list(read_rows(data, flags.image_dir, flags.named_columns, processor))
    return validate_rows(rows, data, task, processor, flags.max_prompt_length, flags.skip_bad_rows, keep_duplicates)


def validate_rows(
    rows: list[Sample | Problem],
    data: str,
    task: str | None,
    processor: Processor | None = None,
    max_prompt_length: int | None = None,
    skip_bad_rows: bool = False,
    keep_duplicates: bool = False,
) -> list[Sample]:
    """Check the gold answers, images and prompts of `rows`, read from `data`, and return the usable rows.

    Images are not kept in memory. Prompts are checked only if there is a `processor`: with their image tokens, they
    must not be longer than `max_prompt_length`, and their lengths are stored as `Sample.tokens`. Without a `task`, a
    gold answer only has to be non-empty.

    Bad and duplicate rows are counted, and the first few are listed. `skip_bad_rows` leaves out both kinds;
    `keep_duplicates` (for test sets) keeps duplicates. Without `skip_bad_rows`, a bad row is an error. All processes
    must call this together; each checks a shard of the rows.
    """
    image_sizes: dict[str, tuple[int, int]] = {}
    check = functools.partial(check_row, task, processor, max_prompt_length, image_sizes)
    local_rows = distributed.shard(rows)
    with ThreadPoolExecutor() as pool:  # image decoding releases the GIL
        checks = pool.map(check, local_rows)
        checked = list(console.progress(checks, f"checking {data}", total=len(local_rows), unit="row"))
    good, bad, duplicates = [], [], []
    first: dict[str, Sample] = {}
    for row, (problem, key, tokens) in zip(rows, distributed.gather_shards(checked)):
        if isinstance(row, Problem) or problem is not None:
            bad.append(f"{row.source}: {problem}")
            continue
        row.tokens = tokens
        good.append(row)
        if first.setdefault(key, row) is not row:
            duplicates.append(f"{row.source} repeats {first[key].source}")
    if bad and not skip_bad_rows:
        problems = summarise(bad, f"of {len(rows)} rows cannot be used")
        raise UserError(f"{problems}; fix them or pass --skip_bad_rows to leave them out")
    if bad:
        console.log(f"skipped: {summarise(bad, f'of {len(rows)} rows')}")
    drop_duplicates = skip_bad_rows and not keep_duplicates
    kept = list(first.values()) if drop_duplicates else good
    usable = {sample.source_index for sample in kept}
    if empty := ", ".join(spec for index, spec in enumerate(data_sets(data)) if index not in usable):
        raise UserError(f"{empty}: no usable row" + ("" if len(kept) == len(good) else " that no other row repeats"))
    if duplicates:
        action = "left out" if drop_duplicates else "kept"
        if not (skip_bad_rows or keep_duplicates):
            action = "kept; --skip_bad_rows leaves them out"
        console.log(f"note: {summarise(duplicates, f'duplicate rows ({action})')}")
    return kept


def max_images(samples: list[Sample], processor: Processor) -> int:
    """Return the largest number of images in a prompt, at least 1, plus the most in an environment's answers."""
    answers = processor.environment.max_images if processor.environment else 0
    return max(1, *(len(sample.images) for sample in samples)) + answers


def summarise(problems: list[str], what: str) -> str:
    """Return the number of `problems`, `what` they are, and the first five of them."""
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return f"{len(problems)} {what}: " + "; ".join(problems[:5]) + more


def check_row(
    task: str | None, processor: Processor | None, max_length: int | None, image_sizes: dict, row: Sample | Problem
) -> tuple[str | None, str, int]:
    """Return why the row cannot be used (None if it can), its key, and its number of prompt tokens.

    Duplicates have the same key, with the responses if there is no `processor`. `image_sizes` caches (height, width).
    """
    if isinstance(row, Problem):
        return row.message, "", 0
    if problem := rewards.gold_problem(task, row.answer):
        return problem, "", 0
    if processor and (environment := processor.environment):
        missing = sorted(name for name in environment.columns if row.fields.get(name) is None)
        if missing:
            return f"no {missing[0]!r}, which the function of --env requires", "", 0
    try:
        for image in row.teacher_images:
            _check_image(image, image_sizes)
        image_keys = [_check_image(image, image_sizes) for image in row.images]
        sizes = [image_sizes[key] for key in image_keys]
        tokens = _checked_length(row, processor, max_length, sizes) if processor else 0
    except ValueError as error:
        return str(error), "", 0
    identity = json.dumps([row.texts, row.answer, row.system, *image_keys, *([] if processor else row.responses)])
    return None, hashlib.sha1(identity.encode()).hexdigest(), tokens


def _check_image(source: ImageSource, image_sizes: dict) -> str:
    """Check an image, store its (height, width) in `image_sizes` and return its key there."""
    try:
        content = read_source(source)
        key = hashlib.sha1(content).hexdigest() if isinstance(content, bytes) else str(content)
        if key not in image_sizes:
            image_sizes[key] = check_image(content)
    except FileNotFoundError as error:
        raise ValueError(f"no image at {str(error.filename or source)[:200]}") from None
    except ValueError as error:
        name = f"image {str(source)[:200]}" if isinstance(source, AnyPath | Cell) else "an image"
        raise ValueError(f"{name}: {error}") from None
    return key


def _checked_length(sample: Sample, processor: Processor, max_length: int | None, sizes: list[tuple[int, int]]) -> int:
    """Return the prompt length in tokens. Raises ValueError if the model cannot accept the prompt."""
    if sample.images and processor.image_processor is None:
        raise ValueError("the row has an image, but the model is text-only")
    characters = sum(map(len, sample.texts)) + len(sample.system or "")
    if max_length is not None and characters > max_length * processor.longest_token:  # encoding it could take minutes
        raise ValueError(f"its prompt has {characters:,} characters; --max_prompt_length is {max_length} tokens")
    length = len(_engine_ids(sample, processor)[0])
    for size in sizes:
        fitted = processor.preparation.fit(*size)
        # The image's tokens, and those around them that `image_ids` adds, replace one placeholder.
        length += processor.preparation.count(*fitted) + len(processor.image_ids(0)) - 1
    if max_length is not None and length > max_length:
        raise ValueError(f"its prompt has {length} tokens, images expanded; --max_prompt_length is {max_length}")
    return length


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(is_needed: bool = False) -> ModuleType | None:
    """Return parts/convert, which has the commands of this file and compares data sets; None if it is not here."""
    return extra("convert", is_needed)


def __getattr__(name: str) -> Any:
    """Find `data.convert` and its settings, `data.Config`, in parts/convert."""
    if name not in ("convert", "Config"):
        raise AttributeError(f"data.py has no {name!r}")
    return getattr(commands(is_needed=True), name)


def main(_: object) -> None:
    commands(is_needed=True).launch()


if __name__ == "__main__":
    cli.run(main, None)
