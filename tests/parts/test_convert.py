"""`data.py show`: a prompt as the model gets it. tests/parts/formats has the conversions."""

import json

import pytest
from PIL import Image

pytest.importorskip("parts.convert", reason="needs parts/convert, which is not here")

from common.errors import UserError
from data import encode_prompt, load_processor, load_samples
from parts.convert import ShowFlags, show


def test_a_prompt_is_shown_as_the_model_gets_it(tiny_model, tmp_path):
    """The two images have different sizes, and their order is that of their tags."""
    Image.new("RGB", (112, 56)).save(tmp_path / "wide.png")
    Image.new("RGB", (56, 70)).save(tmp_path / "small.png")
    good = {"prompt": "<image> or <image>?", "answer": "a", "images": ["wide.png", "small.png"]}
    bad = {"prompt": "Which?", "answer": "a", "images": ["gone.png"]}
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    (tmp_path / "own.jinja").write_text("Look: {{ content }}")
    flags = dict(command="show", model=tiny_model, data=f"{tmp_path}/rows.jsonl", task="vqa")
    small = dict(min_pixels=0, max_pixels=2 * 28 * 28)
    lines = show(ShowFlags(**flags, **small, row=2, template=f"{tmp_path}/own.jinja")).splitlines()
    assert lines[0] == f"{tmp_path}/rows.jsonl row 2, answer 'a', template {tmp_path}/own.jinja"
    assert lines[1:3] == ["image 1: 112x56, resized to 56x28, 2 tokens", "image 2: 56x70, resized to 28x28, 1 tokens"]
    processor = load_processor(tiny_model, "vqa", f"{tmp_path}/own.jinja", **small)
    prompt = encode_prompt(load_samples(f"{tmp_path}/rows.jsonl", "vqa", skip_bad_rows=True)[0], processor)
    count, ids = lines[3].split(" tokens; with one for each image: ")
    assert int(count) == len(prompt.ids) == len(ids.split()) + 1 and ids == " ".join(map(str, prompt.engine_ids))
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    expected = f"<|im_start|>user\nLook: {image} or {image}?<|im_end|>\n<|im_start|>assistant\n"
    assert "\n".join(lines[4:]) + "\n" == expected
    assert "template of --task vqa" in show(ShowFlags(**flags, row=2))
    with pytest.raises(UserError, match=r"--row 1: the rows of \S+ are \S+ row 2 to \S+ row 3$"):
        show(ShowFlags(**flags, row=1))
    with pytest.raises(UserError, match=r"rows.jsonl row 3: no image at .*gone.png"):
        show(ShowFlags(**flags, row=3))
