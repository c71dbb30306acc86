"""The template and the command with which lmms-eval scores a trained run."""

import functools
import json
import shutil

import pytest

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")

from common.errors import UserError
from data import encode_prompts, load_processor
from parts.benchmarks import lmms_eval
from tests.helpers.rows import make_sample

THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking | default(true) %}<think>{% endif %}"
)


@pytest.mark.parametrize("task", ["vqa", "count"])
@pytest.mark.parametrize("as_text", [True, False])
def test_the_chat_template_for_lmms_eval_asks_as_training_did(tiny_model, tmp_path, task, as_text):
    (tmp_path / "t.jinja").write_text('Q: {{ content }}\n"Think" 🤔 {% raw %}{{ }}{% endraw %}\n%}')
    for template in (None, str(tmp_path / "t.jinja")):
        processor = load_processor(tiny_model, task, template)
        rendered = processor.template.render(content="How many?")
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
        expected = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": rendered}]}]
        if as_text:
            messages, expected = ([{"role": "user", "content": text}] for text in ("How many?", rendered))
        elif template:  # the text before the question comes before the image
            expected[0]["content"] = [{"type": "text", "text": "Q: "}, {"type": "image"}]
            expected[0]["content"] += [{"type": "text", "text": rendered.removeprefix("Q: ")}]
        if processor.system:
            expected.insert(0, {"role": "system", "content": processor.system})
        apply = functools.partial(processor.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        wrapped = lmms_eval.chat_template(tiny_model, task, template)
        assert apply(messages, chat_template=wrapped) == apply(expected)
        given = [{"role": "system", "content": "its own"}, *messages]
        assert "its own" in apply(given, chat_template=wrapped)


def test_lmms_eval_is_recommended_with_the_template(tiny_model, tmp_path, capsys):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "adapter_config.json").touch()
    settings = {"model": tiny_model, "task": "math", "template": None}
    settings |= {"min_pixels": 3136, "max_pixels": 7056}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lmms_eval.main(str(tmp_path))
    shown = capsys.readouterr().out
    assert f"--base_model {tiny_model} --lora_model {tmp_path}/final --output_path {tmp_path}/merged" in shown
    assert f"model={tmp_path}/merged,chat_template={tmp_path}/chat_template.jinja," in shown
    assert "mathvista_testmini,mathverse_testmini" in shown and '{"min_pixels":3136,"max_pixels":7056}' in shown
    assert "<think>" in (tmp_path / "chat_template.jinja").read_text()


def test_variables_of_the_chat_template_are_set_as_in_training(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    for setting, thinks in (((), True), (("enable_thinking=true",), True), (("enable_thinking=false",), False)):
        processor = load_processor(str(folder), "count", chat_template_kwargs=setting)
        prompt = encode_prompts([make_sample("How many?", "1", [], "row 1")], processor)[0]
        wrapped = lmms_eval.chat_template(folder, "count", None, setting)
        message = [{"role": "user", "content": "How many?"}]
        as_evaluated = processor.tokenizer.apply_chat_template(message, chat_template=wrapped, tokenize=False)
        assert as_evaluated == processor.tokenizer.decode(prompt.ids)
        assert as_evaluated.endswith("<think>") == thinks


@pytest.mark.parametrize("text", ["[]", "null", "\xff", '{"model": "m", "task": 3}', '{"model": "m"}'])
def test_a_config_of_another_shape_is_refused(text, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config.json cannot be read: restore it"):
        lmms_eval.main(str(tmp_path))
