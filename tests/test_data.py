"""Loading rows, resizing images, encoding prompts, and the error messages for bad rows."""

import io
import json
import pathlib
import stat
import zipfile

import numpy as np
import pytest
from PIL import Image, ImageOps

import evaluate
from common.errors import UserError
from data import commands, encode_prompt, load_processor, load_samples
from grpo import Config
from inputs.images import check_image, decode_image, fit_image, fitted_size
from tests.helpers.marks import needs
from tests.helpers.rows import make_sample
from tests.helpers.scripts import VECTORS
from training.prompt_stream import row_at
from training.run import check_inputs


@pytest.mark.parametrize("case", [json.loads(line) for line in (VECTORS / "resize.jsonl").read_text().splitlines()])
def test_fitted_size_vectors(case):
    got = fitted_size(case["height"], case["width"], case["min_pixels"], case["max_pixels"])
    assert list(got) == case["want"]


def test_fitted_sizes_always_hold_their_limits():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        h, w = (int(x) for x in np.exp(rng.uniform(0, 8.5, 2)) + 1)
        if max(h, w) > 200 * min(h, w):
            continue
        low, max_pixels = sorted(int(x) for x in np.exp(rng.uniform(np.log(28 * 28 * 210), 16, 2)))
        min_pixels = low // 4
        fh, fw = fitted_size(h, w, min_pixels, max_pixels)
        assert fh % 28 == fw % 28 == 0
        assert min(fh, fw) >= 28
        assert fh * fw <= max_pixels, (h, w, min_pixels, max_pixels)


def test_a_very_thin_picture_stays_within_max_pixels():
    h, w = fitted_size(28, 5600, 0, 56 * 56)
    assert h == 28
    assert h * w <= 56 * 56
    assert fitted_size(10, 30, 3136, 3136) == (28, 112)  # the limits conflict, so the upper limit takes precedence
    with pytest.raises(ValueError, match="200 times"):
        fitted_size(1, 201, 0, 10**6)


def test_images_are_oriented_flattened_and_stretched(tmp_path):
    sideways = Image.new("RGB", (40, 20), "red")
    exif = sideways.getexif()
    exif[0x0112] = 6  # the camera was held sideways, so the image must be rotated
    sideways.save(tmp_path / "exif.jpg", exif=exif)
    assert decode_image(tmp_path / "exif.jpg").size == (20, 40)
    exif[0x011A] = 72.0
    sideways.save(tmp_path / "exif.jpg", exif=exif)
    damaged = bytearray((tmp_path / "exif.jpg").read_bytes())
    damaged[damaged.index(b"\x01\x1a\x00\x05") + 3] = 7  # the resolution has a type that it cannot have
    (tmp_path / "exif.jpg").write_bytes(damaged)
    assert decode_image(tmp_path / "exif.jpg").size == (20, 40)

    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode_image(clear).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30] * 256)
    assert decode_image(palette).getpixel((0, 0)) == (10, 20, 30)
    assert decode_image(Image.new("L", (4, 4), 7)).getpixel((0, 0)) == (7, 7, 7)

    ramp = (np.arange(16, dtype=np.uint16).reshape(4, 4) * 273).astype(np.uint16)  # a 12-bit scan stored in 16 bits
    Image.fromarray(ramp).save(tmp_path / "scan.png")
    got = np.asarray(decode_image(tmp_path / "scan.png"))[..., 0]
    assert got.min() == 0
    assert got.max() == 255
    assert len(np.unique(got)) == 16, "a scan must be rescaled, not clipped"
    assert (
        np.asarray(decode_image(Image.fromarray(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)))).max() == 255
    )


def test_every_orientation_is_turned_upright(tmp_path):
    """As Pillow turns it: not only the size tells left from right."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture.save(tmp_path / "x.png", exif=exif)
        upright = ImageOps.exif_transpose(Image.open(tmp_path / "x.png"))
        assert np.array_equal(decode_image(tmp_path / "x.png"), upright), orientation
        assert check_image(tmp_path / "x.png") == upright.size[::-1], orientation


def test_a_float_scan_may_have_pixels_that_are_no_number():
    scan = Image.fromarray(np.array([[np.nan, -1.0, 3.0, np.inf]], dtype=np.float32))
    assert np.asarray(decode_image(scan))[0, :, 0].tolist() == [0, 0, 255, 0]


def test_pictures_are_resized_bicubically():
    noise = Image.effect_noise((60, 90), 80).convert("RGB")
    got = fit_image(noise, lambda h, w: (56, 28))
    assert np.array_equal(got, noise.resize((28, 56), Image.Resampling.BICUBIC))


def test_image_sources(tmp_path):
    Image.new("RGB", (30, 30), "blue").save(tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    for source in (tmp_path / "x.png", str(tmp_path / "x.png"), data, {"bytes": data, "path": None}):
        assert fit_image(source, lambda h, w: fitted_size(h, w, 3136, 10**6)).size == (56, 56)
    assert decode_image({"bytes": None, "path": str(tmp_path / "x.png")}).size == (30, 30)
    with pytest.raises(ValueError, match="neither bytes nor a path"):
        decode_image({"bytes": None, "path": None})


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_engine_ids_expand_to_the_trainers_ids(tiny_model, shapes):
    processor = load_processor(tiny_model, "count")
    prompt = encode_prompt(load_samples(shapes, "count")[0], processor)
    image = processor.image_token_id
    assert prompt.engine_ids.count(image) == 1
    assert (prompt.ids == image).sum() == 9  # an 84 x 84 image has 3 x 3 tokens of 28 x 28 pixels
    assert [t for t in prompt.ids.tolist() if t != image] == [t for t in prompt.engine_ids if t != image]
    assert prompt.position_ids.shape == (3, len(prompt.ids))
    assert prompt.vision["pixel_values"].shape == (36, 1176)
    text = processor.tokenizer.decode(prompt.engine_ids)
    assert "A photo of [NUMBER] [OBJECT_TYPE]" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_the_question_is_data_and_never_rendered(tiny_model, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "{{ 7 * 7 }} {% raw %}", "answer": "x"}))
    (tmp_path / "t.jinja").write_text("Q: {{ content }} A:")
    processor = load_processor(tiny_model, "vqa", template=str(tmp_path / "t.jinja"))
    prompt = encode_prompt(load_samples(str(tmp_path / "d.jsonl"), "vqa")[0], processor)
    assert "Q: {{ 7 * 7 }} {% raw %} A:" in processor.tokenizer.decode(prompt.engine_ids)


def test_a_special_token_in_the_question_is_an_error_that_names_the_row(tiny_model, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "look <|image_pad|>", "answer": "x"}))
    with pytest.raises(UserError, match=r"row 1: <\|image_pad\|> appears in the question"):
        load_samples(str(tmp_path / "d.jsonl"), "vqa", processor=load_processor(tiny_model, "vqa"))


def test_a_tag_in_the_template_is_an_error_that_names_the_row_once(tiny_model, folder):
    (folder / "t.jinja").write_text("<image>{{ content }}")
    processor = load_processor(tiny_model, "vqa", template=str(folder / "t.jinja"))
    with pytest.raises(UserError, match="1 images but 2 image placeholders in the templated prompt") as error:
        load_samples(jsonl(folder, good()), "vqa", processor=processor)
    assert str(error.value).count("row 1") == 1


def test_a_limit_below_one_image_token_is_refused(tiny_model):
    with pytest.raises(UserError, match="too small for one image token, which is 28 x 28 pixels"):
        load_processor(tiny_model, "vqa", min_pixels=0, max_pixels=700)


# --- loading ----------------------------------------------------------------------------------------------------------


def jsonl(folder: pathlib.Path, *rows: dict | str) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.new("RGB", (60, 60), (i, i, i)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def good(i: int = 0, **more) -> dict:
    return {"prompt": "<image>what?", "answer": "yes", "images": [f"images/{i}.png"], **more}


def test_easyr1_rows(folder):
    rows = [
        good(0, extra=5),
        {"problem": "no tag", "answer": 3, "images": ["images/1.png", "images/2.png"]},
        {"prompt": "text only", "answer": "no"},
        {"prompt": "<image> one path", "answer": "x", "images": "images/3.png"},
    ]
    samples = load_samples(jsonl(folder, *rows), "vqa")
    assert [len(s.images) for s in samples] == [1, 2, 0, 1]
    assert samples[0].fields == {"extra": 5}
    assert samples[1].prompt == "<image><image>no tag"  # without tags, images go before the text
    assert samples[1].answer == "3"
    assert samples[1].source.endswith("data.jsonl row 2")
    (folder / "data.json").write_text(json.dumps(rows))
    assert [s.prompt for s in load_samples(str(folder / "data.json"), "vqa")] == [s.prompt for s in samples]


def test_image_dir_is_where_relative_paths_start(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    path = jsonl(elsewhere, {**good(), "images": ["0.png"]})
    assert len(load_samples(path, "vqa", image_dir=str(folder / "images"))) == 1
    with pytest.raises(UserError, match="no image at"):
        load_samples(path, "vqa")


BAD_ROWS = {
    "more tags than images": ({**good(), "prompt": "<image><image>?"}, r"2 <image> tags in the prompt but 1 images"),
    "a literal tag in a text row": ({"prompt": "an <image> tag", "answer": "x"}, r"1 <image> tags .* but 0 images"),
    "a missing image": ({**good(), "images": ["images/none.png"]}, r"no image at .*none\.png"),
    "no prompt": ({"answer": "x"}, r"no text under 'prompt', 'problem' or 'question'"),
    "images that are not paths": ({**good(), "images": [1]}, r"'images' is not a list of paths"),
    "images that are a number": ({**good(), "images": 3}, r"'images' is not a list of paths"),
    "an answer that is a list": ({**good(), "answer": ["yes"]}, r"'answer' is neither text nor a number"),
    "half a surrogate pair": (
        {**good(), "prompt": "<image>q\ud800"},
        r"the prompt, answer or system prompt contains a broken character",
    ),
    "half a surrogate pair in the system prompt": (
        good(system="be brief \udc00"),
        r"the prompt, answer or system prompt contains a broken character",
    ),
    "a path that is a number": ({**good(), "images": [{"path": 5}]}, r"an image's 'path' value is not text"),
    "videos": (good(videos=["a.mp4"]), r"a column is named 'videos', but only text and images are supported"),
    "a video": (good(video={"path": "a.mp4"}), r"a column is named 'video', but only text"),
    "sounds": (good(audios=["a.wav"]), r"a column is named 'audios', but only text"),
    "a sound": (good(Audio="a.wav"), r"a column is named 'Audio', but only text"),
    "a tag of a video": ({**good(), "prompt": "<video><image>?"}, r"<video> in the prompt, but only text and images"),
    "a tag of a sound": ({**good(), "prompt": "<image><audio>?"}, r"<audio> in the prompt, but only text and images"),
    "a reserved column": (good(completion="x"), r"a column is named 'completion'"),
    "an empty answer": ({**good(), "answer": " "}, r"the answer is empty"),
    "no answer": ({"prompt": "<image>?", "images": ["images/0.png"]}, r"the answer is empty"),
    "an answer without a word": ({**good(), "answer": "?!"}, r".* contains no words to compare"),
    "not JSON": ("{broken", r"not JSON"),
    "not an object": ("[1]", r"not an object with columns"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_file_and_row(folder, name, capsys):
    row, message = BAD_ROWS[name]
    path = jsonl(folder, *[good(i) for i in range(3)], row)
    with pytest.raises(UserError, match=rf"1 of 4 rows cannot be used: .*data\.jsonl row 4: {message}"):
        load_samples(path, "vqa")
    assert len(load_samples(path, "vqa", skip_bad_rows=True)) == 3
    assert "skipped: 1 of 4 rows" in capsys.readouterr().err


def test_many_bad_rows_are_counted_and_the_first_few_named(folder):
    rows = [{**good(), "answer": ""} for _ in range(9)]
    with pytest.raises(UserError, match=r"9 of 9 rows .*row 1: .*row 5: .*; and 4 more; fix them or pass"):
        load_samples(jsonl(folder, *rows), "vqa")
    with pytest.raises(UserError, match="no usable row"):
        load_samples(jsonl(folder, *rows), "vqa", skip_bad_rows=True)


def test_over_long_prompts_are_counted_with_their_image_tokens(folder, tiny_model):
    processor = load_processor(tiny_model, "vqa")
    path = jsonl(folder, good())
    samples = load_samples(path, "vqa", processor=processor, max_prompt_length=10_000)
    length = len(encode_prompt(samples[0], processor).ids)
    assert load_samples(path, "vqa", processor=processor, max_prompt_length=length)
    with pytest.raises(UserError, match=rf"its prompt has {length} tokens, images expanded; --max_prompt_length is"):
        load_samples(path, "vqa", processor=processor, max_prompt_length=length - 1)


def test_a_prompt_of_many_characters_is_refused_before_it_is_encoded(folder, tiny_model, monkeypatch):
    """Encoding 50 MB takes minutes and gigabytes. No prompt that is short enough in tokens has so many characters."""
    processor = load_processor(tiny_model, "vqa")
    limit = 100 * processor.longest_token
    rows = [{"prompt": "x" * limit, "answer": "1"}, {"prompt": "q", "answer": "1", "system": "x" * limit}]
    monkeypatch.setattr("data._engine_ids", lambda *_: pytest.fail("the prompt must not be encoded"))
    message = rf"2 of 2 rows .*row 1: its prompt has {limit + 1:,} characters; .* 100 tokens.*row 2: its prompt has"
    rows[0]["prompt"] += "x"
    with pytest.raises(UserError, match=message):
        load_samples(jsonl(folder, *rows), "vqa", processor=processor, max_prompt_length=100)


def test_fields_without_a_video_or_sound_are_accepted(folder):
    assert load_samples(jsonl(folder, good(videos=[], video=None, audio="", videographer="me")), "vqa")


def test_millions_of_blank_lines_are_skipped(folder, monkeypatch):
    """They count as rows. In main.csv, where a blank line may be part of a cell, their number is limited."""
    path = jsonl(folder, "\n" * 2_000_000, good())
    assert load_samples(path, "vqa")[0].source.endswith("row 2000002")
    header, row = "images_path,question,answer\n", '0.png,"How many,\n\n\n\n\nthen?",3\n'
    monkeypatch.setattr("inputs.rows.MAX_BLANK_ROWS", 4)
    (folder / "main.csv").write_text(header + "\n" * 4 + row)
    assert load_samples(str(folder), "count")[0].source.endswith("row 6")
    (folder / "main.csv").write_text(header + "\n" * 5 + row)
    with pytest.raises(UserError, match=r"main\.csv has more than 4 blank rows: remove them"):
        load_samples(str(folder), "count")


def test_counting_folder(folder):
    text = '\ufeffimages_path,question,answer\nimages/0.png,"How many, then?",A photo of 3 cats\n1.png,?,7個\n'
    (folder / "main.csv").write_text(text, encoding="utf-8")
    samples = load_samples(str(folder), "count")
    assert [s.answer for s in samples] == ["A photo of 3 cats", "7個"]
    assert samples[0].prompt == "<image>How many, then?"
    assert samples[0].source.endswith("main.csv row 2")


TEMPLATES = ["{{ raise_exception('no system prompt') }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{% include 'x' %}"]
TEMPLATES += [
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for %}",
    "{{ range(10**9) | list }}",
    "{{ 1 | nothing }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_raises_is_named_with_the_row(folder, tiny_model, template):
    processor = load_processor(tiny_model, "vqa")
    processor.tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"1 of 1 rows .*row 1: the model's chat template refuses the prompt: \w"):
        load_samples(jsonl(folder, good()), "vqa", processor=processor)


@pytest.mark.parametrize("ending", ["", " Use <think>...</think> and <answer>...</answer>."])
def test_a_prompt_that_asks_for_the_format_is_not_asked_twice(tiny_model, ending):
    processor = load_processor(tiny_model, "math")
    prompt = encode_prompt(make_sample(f"1 + 1?{ending}", "2", [], "row 1"), processor)
    text = processor.tokenizer.decode(prompt.ids)
    assert text.count("<think>") == text.count("<answer>") == 1


QUESTION = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>", "<think>"),
        ("<|im_start|>assistant\nLet me see. <think>\nOkay,", "<think>\nOkay,"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),  # no thoughts are wanted
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n<answer>", "<answer>"),
        ("<|im_start|>assistant\n", ""),
    ],
)
@pytest.mark.parametrize("question", ["1 + 1?", "Write <think> and then think."])
def test_what_the_chat_template_opens_belongs_to_the_completion(tiny_model, question, ending, opening):
    processor = load_processor(tiny_model, "math")
    processor.tokenizer.chat_template = f"{QUESTION}{{{{ {ending!r} }}}}"
    assert encode_prompt(make_sample(question, "2", [], "row 1"), processor).opening == opening


def test_an_image_that_cannot_be_encoded_is_named_in_a_line(tiny_model):
    """An image in a table is its bytes, of which a message shows the first."""
    sample = make_sample("<image>?", "2", [b"no image" * 1000], "row 1")
    with pytest.raises(UserError, match=r"row 1: image b'no image.*not a readable image") as raised:
        encode_prompt(sample, load_processor(tiny_model, "count"))
    assert len(str(raised.value)) < 500


BAD_TEMPLATES = [
    ("{{ content", "unexpected end"),
    ("{{ other }}", "is undefined"),
    ("Q:", "does not contain the content: add"),
    ("{{ content + 1 }}", "can only concatenate str"),
    ("{{ content }}{{ 1 / 0 }}", "division by zero"),
    ("{{ content }}{% for i in range(10**9) %}{% endfor %}", "Range too big"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEMPLATES)
def test_bad_templates(tiny_model, tmp_path, text, message):
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises(UserError, match=rf"--template .*t\.jinja.*{message}"):
        load_processor(tiny_model, "vqa", template=str(tmp_path / "t.jinja"))


@pytest.mark.parametrize("gold", ["<answer> yes", "?!"])
def test_a_gold_answer_is_refused_only_by_a_reward_that_counts(folder, tiny_model, gold):
    flags = {"task": "vqa", "model": tiny_model, "prompts_per_step": 1, "prompts_per_update": 1}
    flags |= {"data": jsonl(folder, good(), good(1, answer=gold)), "output": str(folder / "run")}
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used: .*data\.jsonl row 2: the answer '.*' c"):
        check_inputs(Config(**flags))
    assert len(check_inputs(Config(**flags, skip_bad_rows=True))[0].samples) == 1
    assert len(check_inputs(Config(**flags, reward=("vqa=0", "format")))[0].samples) == 2


@needs("parts/convert")
def test_rows_of_a_picture_are_held_out_together(folder, tiny_model, capsys):
    """The held-out pictures depend on the seed alone. Without pictures, rows of the same text stay together."""
    rows = [good(i, images=[f"{i // 2}.png"]) for i in range(10)]
    for i in range(5):
        Image.new("RGB", (56, 56), (i, 0, 0)).save(folder / f"{i}.png")
    flags = {"task": "vqa", "model": tiny_model, "prompts_per_step": 1, "output": str(folder / "run")}
    flags |= {"data": jsonl(folder, *rows), "eval_data": "0.4"}
    stream, held_out, *_ = check_inputs(Config(**flags))
    assert "held out: 4 of 10 rows" in capsys.readouterr().err
    pictures = [{sample.images[0].name for sample in each} for each in (stream.samples, held_out)]
    assert (len(stream.samples), len(held_out), *map(len, pictures)) == (6, 4, 3, 2) and not set.intersection(*pictures)
    assert [s.source for s in check_inputs(Config(**flags))[1]] == [s.source for s in held_out]
    texts = [make_sample(f"how many {i // 2}?", "1", [], str(i)) for i in range(10)]
    cut = commands(is_needed=True).hold_out(texts, Config(**flags))
    assert [len(part) for part in cut] == [6, 4]
    with pytest.raises(UserError, match=r"no data at '1.5'"):
        check_inputs(Config(**flags | {"eval_data": "1.5"}))


@pytest.mark.parametrize(("reward", "refused"), [((), True), (("vqa=0", "format"), False)])
def test_saved_predictions_are_checked_likewise(folder, reward, refused):
    rows = [{"prompt": "q", "answer": gold, "response": "yes"} for gold in ("<answer> yes </answer>", "?!")]
    cfg = evaluate.Config(predictions=jsonl(folder, *rows), task="vqa", reward=reward, output=str(folder / "scored"))
    if refused:
        with pytest.raises(UserError, match=r"1 of 2 rows cannot be used: .*row 2: the answer '\?!' contains no words"):
            evaluate.main(cfg)
    else:
        evaluate.main(cfg)
        answers = map(json.loads, (folder / "scored" / "predictions.jsonl").read_text().splitlines())
        assert [row["answer"] for row in answers] == ["yes", "?!"]


# --- ZIP --------------------------------------------------------------------------------------------------------------


def zipped(path: pathlib.Path, prefix: str = "", **extra: bytes) -> str:
    image = io.BytesIO()
    Image.new("RGB", (60, 60), "green").save(image, "PNG")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/main.csv", "not this one")
        archive.writestr(prefix + "main.csv", "images_path,question,answer\nimages/1.png,How many?,3\n1.png,And?,4\n")
        archive.writestr(prefix + "images/1.png", image.getvalue())
        for name, data in extra.items():
            archive.writestr(name, data)
    return str(path)


@needs("parts/formats")
@pytest.mark.parametrize("prefix", ["", "my data/"])
def test_a_zip_is_read_where_it_is(tmp_path, prefix, tiny_model):
    path = zipped(tmp_path / "d.zip", prefix)
    samples = load_samples(path, "count", processor=load_processor(tiny_model, "count"))
    assert [s.answer for s in samples] == ["3", "4"]
    assert decode_image(samples[1].images[0]).getpixel((0, 0)) == (0, 128, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["d.zip"], "the ZIP must not be unpacked"


@needs("parts/formats")
@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..\\x", "C:/x"])
def test_a_zip_with_a_path_that_leaves_its_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="points outside the ZIP"):
        load_samples(zipped(tmp_path / "d.zip", **{name: b"x"}), "count")
    assert [p.name for p in tmp_path.iterdir()] == ["d.zip"]


@needs("parts/formats")
def test_a_zip_with_a_link_is_refused(tmp_path):
    path = zipped(tmp_path / "d.zip")
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("images/2.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="is a link"):
        load_samples(path, "count")


@needs("parts/formats")
def test_a_zip_with_a_name_that_is_not_utf8_is_refused(tmp_path):
    path = pathlib.Path(zipped(tmp_path / "d.zip", **{"images/é.png": b"x"}))
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(UserError, match=r"d\.zip has a file name that is not UTF-8 .*: rename the file"):
        load_samples(str(path), "count")


@needs("parts/formats")
def test_an_encrypted_zip_is_refused(tmp_path):
    zipped(tmp_path / "d.zip")
    for name, message in (("main.csv", "cannot read .* is encrypted"), ("images/1.png", "row 2: .* is encrypted")):
        with (
            zipfile.ZipFile(tmp_path / f"{name[:4]}.zip", "w") as archive,
            zipfile.ZipFile(tmp_path / "d.zip") as source,
        ):
            for member in source.namelist():
                archive.writestr(member, source.read(member))
            archive.getinfo(name).flag_bits |= 1
        with pytest.raises(UserError, match=message):
            load_samples(f"{tmp_path}/{name[:4]}.zip", "count")


@needs("parts/formats")
def test_other_broken_zips(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match="not a readable ZIP"):
        load_samples(str(tmp_path / "a.zip"), "count")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a/b/main.csv", "too deep")
    with pytest.raises(UserError, match=r"has no main\.csv"):
        load_samples(str(tmp_path / "b.zip"), "count")
    damaged = bytearray(pathlib.Path(zipped(tmp_path / "c.zip")).read_bytes())
    image = zipfile.ZipFile(tmp_path / "c.zip").getinfo("images/1.png")
    damaged[image.header_offset + 30 + len(image.filename) + image.compress_size // 2] ^= 0xFF
    (tmp_path / "c.zip").write_bytes(damaged)
    with pytest.raises(UserError, match=r"2 of 2 rows .*row 2: image .*1\.png: not a readable image"):
        load_samples(str(tmp_path / "c.zip"), "count")


def test_missing_data(tmp_path):
    with pytest.raises(UserError, match=r"no data at .*nowhere"):
        load_samples(str(tmp_path / "nowhere"), "count")
    (tmp_path / "x.txt").write_text("?")
    with pytest.raises(UserError, match="is not a folder or"):
        load_samples(str(tmp_path / "x.txt"), "count")


def test_the_stream_goes_through_every_row_each_epoch_in_a_new_order():
    first, second = ([row_at(index, 10, seed=3) for index in range(start, start + 10)] for start in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [row_at(index, 10, seed=4) for index in range(10)]
