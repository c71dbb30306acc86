"""Prompts as turns: their token ids, and that one question has the ids that it had when a prompt was one string."""

import hashlib
import itertools
import json
import random
import re

import pytest
from PIL import Image

import data
import evaluate
from common.errors import UserError
from common.records import Sample, Turn
from config import RewardFlags
from data import encode_prompt, load_processor, load_samples
from evaluation.held_out import judge_task
from evaluation.metrics import summarise
from evaluation.scorer import Scorer
from inputs.images import decode_image
from tests.helpers.marks import needs
from tests.helpers.scripts import ROOT, VECTORS
from training.prompt_stream import PromptStream

TEMPLATES = [None, *(ROOT / "recipes" / f"{name}.jinja" for name in ("geo3k", "math", "sums", "vqa"))]
COLORS = ["red", "green", "blue", "black"]


def ids_of_one_string(prompt: str, system: str | None, processor: data.Processor) -> list[int]:
    """Compute the sampler's token ids of a question with `<image>` tags, without turns."""
    if "<think>" not in prompt or "<answer>" not in prompt:
        prompt = processor.template.render(content=prompt)
    pieces = [piece for piece in re.split("(<image>)", prompt) if piece]
    parts = [{"type": "image"} if piece == "<image>" else {"type": "text", "text": piece} for piece in pieces]
    messages = [{"role": "user", "content": parts if "<image>" in prompt else prompt}]
    if system or processor.system:
        messages = [{"role": "system", "content": system or processor.system}, *messages]
    chat = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor.tokenizer(chat, add_special_tokens=False).input_ids


def rows_digest(pairs: list[tuple[str, ...]]) -> str:
    """Compute the digest of (prompt, answer, system prompt) that a checkpoint compares when a run resumes."""
    return hashlib.sha256("".join(json.dumps(list(pair)) for pair in pairs).encode()).hexdigest()[:16]


@pytest.fixture
def folder(tmp_path):
    for color in COLORS:
        Image.new("RGB", (60, 60), color).save(tmp_path / f"{color}.png")
    return tmp_path


def written(folder, rows: list[dict]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


# --- one question, as before ------------------------------------------------------------------------------------------

WORDS = ["How many?", " ", "\n\n", "<imag", "image>", "{{ content }}", "数", "<think>", "<answer>", "Question: x", "<"]
SHAPES = ["text", "no tags", "parts", "placeholders", "json", "conversations", "messages"]


def random_row(rng: random.Random) -> tuple[dict, str, list[str], str | None]:
    """Return a row of a random shape whose prompt is one question, and that question, its images and system prompt."""
    pieces = [rng.choice([*WORDS, None]) for _ in range(rng.randint(1, 6))] + ["?"]
    text = "".join("<image>" if piece is None else piece for piece in pieces)
    images = [f"{rng.choice(COLORS)}.png" for _ in range(text.count("<image>"))]
    system, shape = rng.choice([None, "Be brief.", "Look at <image>."]), rng.choice(SHAPES)
    row = {"answer": "3", "images": images, "system": system}
    if shape == "text":
        return row | {"prompt": text}, text, images, system
    if shape == "no tags":
        text = text.replace("<image>", "")
        return row | {"problem": text}, "<image>" * len(images) + text, images, system
    parts = [{"type": "image"} if p == "<image>" else {"type": "text", "text": p} for p in re.split("(<image>)", text)]
    if shape == "parts":
        row["images"], remaining = [], iter(images)
        parts = [part | ({"image": next(remaining)} if part["type"] == "image" else {}) for part in parts]
    role, content = ("from", "value") if shape == "conversations" else ("role", "content")
    chat = [{role: "user", content: parts if shape in ("parts", "placeholders") else text}]
    if row.pop("system"):
        chat.insert(0, {role: "system", content: system})
    if shape in ("conversations", "messages"):
        chat.append({role: "assistant", content: row.pop("answer")})
        text = re.sub(r"^((\s|<image>)*)Question:\s*", r"\1", text)
        return row | {shape: chat}, text, images, system
    return row | {"prompt": json.dumps(chat) if shape == "json" else chat}, text, images, system


@pytest.mark.parametrize("task", ["count", "math"])
def test_500_random_chats_have_the_token_ids_of_one_string(tiny_model, folder, task):
    rng = random.Random(0)
    cases = [random_row(rng) for _ in range(500)]
    samples = load_samples(written(folder, [row for row, *_ in cases]), None)
    processor = load_processor(tiny_model, task)
    for sample, (row, text, images, system) in zip(samples, cases, strict=True):
        assert (sample.prompt, [path.name for path in sample.images], sample.system) == (text, images, system), row
        assert encode_prompt(sample, processor).engine_ids == ids_of_one_string(text, system, processor), row
    stream = PromptStream(samples, processor, seed=0)
    texts = [(text, "3", *filter(None, [system])) for _, text, _, system in cases]
    assert stream.fingerprint["rows_digest"] == rows_digest(texts)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem if path else "of the task")
def test_published_rows_and_recipes_have_the_token_ids_of_one_string(tiny_model, tmp_path, template):
    smoke = pytest.importorskip("apps.demo.smoke", reason="needs apps/, which is not here")
    sources = [str(path) for path in (VECTORS / "rows").glob("*.jsonl")]
    for recipe in ("vqa", "geo3k", "math", "count"):
        (tmp_path / recipe).mkdir()
        getattr(smoke, f"write_{recipe}")(tmp_path / recipe, smoke.np.random.default_rng(0))
    sources += [f"{tmp_path}/{name}" for name in ("vqa/train.jsonl", "geo3k/train.jsonl", "math/text.parquet")]
    sources += [f"{tmp_path}/{name}" for name in ("math/image", "count/train.zip")]
    samples = list(itertools.chain(*(load_samples(source, None) for source in sources)))
    assert len(samples) == 13 + 5 * smoke.ROWS and sum(map(len, (sample.images for sample in samples))) >= 40
    for task in ("count", "vqa", "math"):
        processor = load_processor(tiny_model, task, template=template and str(template))
        for sample in samples:
            want = ids_of_one_string(sample.prompt, sample.system, processor)
            assert encode_prompt(sample, processor).engine_ids == want, sample.source
            assert len(sample.turns) == 1


# --- several turns ----------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}],
    },
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And <image>this?"},
]
TEMPLATED = """<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Is <|vision_start|><|image_pad|><|vision_end|> red?<|im_end|>
<|im_start|>assistant
Yes.<|im_end|>
<|im_start|>user
Q: And <|vision_start|><|image_pad|><|vision_end|>this?<|im_end|>
<|im_start|>assistant
"""
IMAGES = {"images": ["red.png", "blue.png"]}
REPLY = {"role": "assistant", "content": "No."}
AS_FROM_AND_VALUE = [{"from": turn["role"], "value": turn["content"]} for turn in CHAT]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CHAT, "answer": "No.", **IMAGES},
        {"prompt": json.dumps(CHAT), "answer": "No.", **IMAGES},
        {"prompt": CHAT[1:], "system": "Be brief.", "answer": "No.", **IMAGES},
        {"messages": [*CHAT, REPLY], **IMAGES},
        {"messages": CHAT, "solution": "No.", **IMAGES},
        {"conversations": [*AS_FROM_AND_VALUE, {"from": "gpt", "value": "Answer: No."}], **IMAGES},
    ],
)
def test_a_prompt_of_several_turns(tiny_model, folder, row):
    """The template is applied to the last turn only, and each image is where its turn has it."""
    (folder / "t.jinja").write_text("Q: {{ content }}")
    processor = load_processor(tiny_model, "vqa", template=str(folder / "t.jinja"))
    (sample,) = load_samples(written(folder, [row]), "vqa", processor=processor)
    prompt = encode_prompt(sample, processor)
    assert processor.tokenizer.decode(prompt.engine_ids) == TEMPLATED
    assert [image.getpixel((0, 0)) for image in prompt.images] == [(255, 0, 0), (0, 0, 255)]
    assert (prompt.ids == processor.image_token_id).sum() == 2 * 4  # each image has 2 x 2 tokens
    assert sample.tokens == len(prompt.ids)
    assert (sample.prompt, sample.answer, sample.system) == ("And <image>this?", "No.", "Be brief.")
    assert [turn.role for turn in sample.turns] == ["user", "assistant", "user"]


def test_images_without_tags_come_before_the_first_turn(folder):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (sample,) = load_samples(written(folder, [{"prompt": chat, "answer": "1", **IMAGES}]), None)
    assert sample.texts == ["<image><image>a", "b", "c"]
    assert [path.name for path in sample.images] == ["red.png", "blue.png"]


@pytest.mark.parametrize(
    ("text", "images"), [("<image>{{ content }}", 3), ("Look.{{ content | replace('<image>', '') }}", 1)]
)
def test_a_template_that_changes_the_number_of_images_is_refused(tiny_model, folder, text, images):
    (folder / "t.jinja").write_text(text)
    processor = load_processor(tiny_model, "vqa", template=str(folder / "t.jinja"))
    with pytest.raises(UserError, match=f"row 1: 2 images but {images} image placeholders in the templated prompt"):
        load_samples(written(folder, [{"prompt": CHAT, "answer": "1", **IMAGES}]), "vqa", processor=processor)


def test_every_turn_is_checked_and_tells_rows_apart(tiny_model, folder, capsys):
    def row(first: str) -> dict:
        return {"prompt": [{"role": "user", "content": first}, REPLY, {"role": "user", "content": "q"}], "answer": "1"}

    processor = load_processor(tiny_model, "vqa")
    for text, problem in (("<|im_end|>", "row 1: <|im_end|> appears"), ("x" * 10**6, "row 1: its prompt has 1,000,")):
        with pytest.raises(UserError, match=re.escape(problem)):
            load_samples(written(folder, [row(text)]), "vqa", processor=processor, max_prompt_length=100)
    with pytest.raises(UserError, match="row 1: the prompt, answer or system prompt contains a broken character"):
        load_samples(written(folder, [row("\ud800")]), "vqa")
    with pytest.raises(UserError, match="row 1: <video> in the prompt"):
        load_samples(written(folder, [row("<video>")]), "vqa")
    samples = load_samples(written(folder, [row("a"), row("b"), row("a")]), "vqa")
    assert "1 duplicate rows (kept; --skip_bad_rows leaves them out)" in capsys.readouterr().err
    digests = [PromptStream([sample], processor, seed=0).fingerprint["rows_digest"] for sample in samples]
    assert digests[0] == digests[2] != digests[1]


@needs("parts/convert")
@needs("parts/formats")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_several_turns_are_converted(folder, suffix):
    from parts import convert

    source = written(folder, [{"prompt": CHAT, "answer": "1", **IMAGES}])
    convert.convert(convert.Config("convert", source, str(folder / f"out.{suffix}")))
    (before,), (after,) = load_samples(source, None), load_samples(str(folder / f"out.{suffix}"), None)
    assert (before.texts, before.answer, before.system) == (after.texts, after.answer, after.system)
    first, second = ([decode_image(image).tobytes() for image in sample.images] for sample in (before, after))
    assert first == second


def test_a_column_named_calls_is_no_score(tmp_path):
    row = {"prompt": "And?", "answer": "3", "failed_calls": 2, "calls": [1, 2]}
    (sample,) = load_samples(written(tmp_path, [row]), "count")
    output = {"responses": ["3"], "lengths": [1], "truncated": [False]}
    predictions = judge_task(Scorer("count", RewardFlags()), [sample], [output])
    assert {"calls", "failed_calls"}.isdisjoint(summarise(predictions, "count"))


def test_saved_predictions_of_several_turns_hold_no_images(tmp_path):
    """The prompt that is saved is the last turn, here without a tag."""
    (tmp_path / "r.py").write_text("def area(completion, answer, images): return len(images)\n")
    row = {"prompt": "And this?", "answer": "3", "responses": ["3"], "image_digest": "ab"}
    cfg = evaluate.Config(predictions=written(tmp_path, [row]), task="count", output=str(tmp_path / "out"))
    from parts.benchmarks import read_predictions

    samples, outputs = read_predictions(cfg.predictions, evaluate.Judge(cfg))
    assert judge_task(Scorer("count", RewardFlags()), samples, outputs)[0]["prompt"] == "And this?"
    with pytest.raises(UserError, match="saved predictions hold no images, which a reward needs"):
        judge_task(Scorer("count", RewardFlags(reward=(f"{tmp_path}/r.py:area",))), samples, outputs)


def test_rewards_get_the_last_turn_as_the_question():
    turns = [Turn("user", ["a"]), Turn("assistant", ["b"]), Turn("user", [Image.new("RGB", (9, 9)), "c"])]
    assert Sample(turns, "1", "row 1").prompt == "<image>c"
