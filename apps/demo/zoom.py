"""Build the model and the data of `./run.sh zoom`: a digit so small in its picture that the model has to zoom in.

    python -m apps.demo.zoom --seed 1 --output runs/tiny/zoom-1

The picture has 336 x 336 pixels, and the model sees it at 42 x 42, where the scan of a handwritten digit is a blob of
4.5 pixels. The tool of examples/zoom.py enlarges a part of it. The model is that of `tiny.py` with smaller patches, and
with whole numbers and the text between them as tokens. Its warm start teaches it to call the tool in the right form at
random places, and to read what it then sees. Where to look is left to GRPO.

Writes OUTPUT/model, OUTPUT/train and OUTPUT/test. A folder that was already built with the same settings is kept.
"""

import importlib
import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from apps.demo import tiny
from common import cli
from common.errors import require

zoom = importlib.import_module("examples.zoom").zoom  # a plain import would have the type checker check the examples
VERSION = 1  # increase this when the model or the data changes, so that existing folders are built again
SIZE, SCAN, JITTER = 336, 36, 2  # sides of the picture and of the scan in it; how far it is from its cell's centre
SEEN, PART = 42, 14  # sides of the picture as the model sees it, and of a cell in it, which a call enlarges
CELLS = [(x, y) for y in range(0, SEEN, PART) for x in range(0, SEEN, PART)]  # their corners
AIMED = 0.9  # how often a part that the warm start reads shows the digit
QUESTION, WHERE, NOTHING = "Which digit is it?", "Where is the digit?", "nothing"
TOOLS = "Tools: zoom(x1, y1, x2, y2)"  # as the chat template writes the schema of examples/zoom.py
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}"
    "({{ tool.function.parameters.required | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    # as in Qwen's templates, what a tool returns is a turn of the user
    + tiny.CHAT_TEMPLATE.replace("{{ message.role }}", "{{ 'user' if message.role == 'tool' else message.role }}")
)


@dataclass
class Config:
    """Build and warm-start the model of `./run.sh zoom`, and write its data."""

    output: str | None = None
    """Folder to write. Default: runs/tiny/zoom-SEED."""
    seed: int = 0
    """Seed for the pictures, the weights and the batches."""
    pictures: int = 4096
    """Number of pictures to train on."""
    steps: int = 700
    """Number of warm-start steps, each with a batch of 48 rows."""

    def __post_init__(self) -> None:
        require(self.seed >= 0 and min(self.pictures, self.steps) >= 1, "pictures and steps must be at least 1")


# --- model and tokenizer ----------------------------------------------------------------------------------------------


def box(x: int, y: int) -> dict[str, int]:
    """Return the corners of the cell whose first corner is (x, y)."""
    return {"x1": x, "y1": y, "x2": x + PART, "y2": y + PART}


def call(x: int, y: int) -> str:
    """Return the call that enlarges this cell."""
    return f"<tool_call>{json.dumps({'name': 'zoom', 'arguments': box(x, y)})}</tool_call>"


def reply(answer: object) -> str:
    """Return a reply with this answer."""
    return f"<think>I see {answer}.</think><answer>{answer}</answer>"


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Build a byte-pair tokenizer for which a whole number, or the text between two of them, is one token."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r" ?\b\d+"), "isolated"), pieces])
    texts = [QUESTION, WHERE, f"system\n{TOOLS}", "user\n", "assistant\n", reply(NOTHING)]
    texts += [text for n in range(SEEN + 1) for text in (reply(n), json.dumps(box(n, n)), call(n, n))]
    symbols = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=symbols, show_progress=False))
    return tiny.with_special_tokens(tokenizer, CHAT_TEMPLATE)


# --- data -------------------------------------------------------------------------------------------------------------


def draw(scan: np.ndarray, cell: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return a dark picture with `scan` (64,) in bright ink, near the centre of the `cell` with this corner.

    The ground gets redder to the right and greener to the bottom, so that a place is known by its colour.
    """
    ground = rng.integers(0, 40, (SIZE // 16, SIZE // 16, 3)).astype(float)
    ramp = np.linspace(0, 110, len(ground))
    ground[..., 0] += ramp
    ground[..., 1] += ramp[:, None]
    picture = Image.fromarray(ground.astype(np.uint8)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    ink = Image.fromarray((scan.reshape(8, 8) * 255 / 16).astype(np.uint8))
    scale, jitter = SIZE // SEEN, rng.integers(-JITTER, JITTER + 1, 2).tolist()
    x, y = (scale * corner + (scale * PART - SCAN) // 2 + shift for corner, shift in zip(cell, jitter))
    picture.paste((255, 255, 255), (x, y), ink.resize((SCAN, SCAN), Image.Resampling.BICUBIC))
    return picture


def write_rows(file: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_pictures(folder: pathlib.Path, scans: np.ndarray, number: int, rng: np.random.Generator) -> list[dict]:
    """Write pictures of `scans` (N, 65), and data.jsonl, which asks for their digits. Return its rows."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for i in range(number):
        scan, name, cell = scans[i % len(scans)], f"images/{i:04d}.jpg", CELLS[rng.integers(len(CELLS))]
        draw(scan[:-1], cell, rng).save(folder / name)
        rows.append({"prompt": f"<image>{QUESTION}", "answer": str(int(scan[-1])), "images": [name], "cell": cell})
    write_rows(folder / "data.jsonl", rows)
    return rows


def warm_start_rows(folder: pathlib.Path, rows: list[dict], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield chats about the pictures in `folder`, whose last turns are trained on.

    They are calls at random places, whatever the picture shows; what is read in a part, which is written to parts/, or
    `NOTHING` if the digit is elsewhere (the call before is part of the prompt); and, without the tool, where the digit
    is, as pretrained models can say, and which, for comparison.
    """
    (folder / "parts").mkdir()
    places = rng.integers(len(CELLS), size=len(rows)).tolist()  # drawn before anything that depends on a picture
    tools, question = {"role": "system", "content": TOOLS}, {"role": "user", "content": f"<image>{QUESTION}"}
    where = {"role": "user", "content": f"<image>{WHERE}"}

    def chat(turns: list[dict], answer: str, *images: str) -> dict[str, Any]:
        return {"messages": [*turns, {"role": "assistant", "content": answer}], "images": images}

    for i, row in enumerate(rows):
        (image,), part, digit = row["images"], f"parts/{i:04d}.png", row["answer"]
        if i % 4 == 0:
            yield chat([tools, question], call(*CELLS[places[i]]), image)
        if i % 4 == 2:
            yield chat([question], reply(digit), image)
        yield chat([where], json.dumps(box(*row["cell"])), image)
        cell = row["cell"] if rng.random() < AIMED else CELLS[rng.integers(len(CELLS))]
        enlarged = zoom(call(*cell), {}, [Image.open(folder / image)], [(SEEN, SEEN)])
        enlarged.resize((SEEN, SEEN), Image.Resampling.BICUBIC).save(folder / part)
        turns = [{"role": "assistant", "content": call(*cell)}, {"role": "user", "content": "<image>"}]
        seen = digit if cell == row["cell"] else NOTHING
        yield chat([tools, question, *turns], reply(seen), image, part)
        if i % 2 == 1:
            yield chat([question], reply(seen), part)


def build(cfg: Config, folder: pathlib.Path) -> None:
    """Write the data and the warm-started model to `folder`."""
    rng = np.random.default_rng(cfg.seed)
    scans = rng.permutation(tiny.read_scans())  # no scan is in both folders
    write_pictures(folder / "test", scans[1397:], 256, rng)
    rows = write_pictures(folder / "train", scans[:1397], cfg.pictures, rng)
    chats = folder / "train" / "chats.jsonl"
    write_rows(chats, [*warm_start_rows(folder / "train", rows, rng)])
    tokenizer = make_tokenizer()
    model = tiny.build_model(tokenizer, cfg.seed, patch_size=7)
    tiny.save(model, tokenizer, folder / "model")
    flags = dict(template="recipes/zoom.jinja", min_pixels=SEEN**2, max_pixels=SEEN**2)
    tiny.fine_tune(folder, chats, seed=cfg.seed, max_steps=cfg.steps, lr_schedule="cosine", **flags)
    print(f"built a model with {model.num_parameters() / 1e6:.1f} M parameters and its data")


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.output or f"runs/tiny/zoom-{cfg.seed}")
    made_from = {"version": VERSION, "seed": cfg.seed, "pictures": cfg.pictures, "steps": cfg.steps}
    tiny.build_once(folder, made_from, lambda partial: build(cfg, partial))


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
