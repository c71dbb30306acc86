"""Supervised fine-tuning: the loss of transformers, resumed runs, adapters that GRPO takes, and rows it refuses."""

import json
from dataclasses import replace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, normalizers
from transformers import AutoModelForImageTextToText

import data
import grpo
import sft
from common import plugins
from common.distributed import local_tensor
from common.errors import UserError
from common.files import read_jsonl
from common.records import Sampling
from common.templates import answer_end
from data import encode_prompt, encode_response, load_processor, load_samples
from policy.batches import micro_batches
from policy.model import load_config, load_model, stop_tokens
from rewards import TASKS, Task, vqa_reward
from sampling.hf_engine import HFEngine
from tests.helpers.marks import needs
from tests.helpers.models import end_with, save_tiny
from tests.helpers.rows import make_sample
from tests.helpers.runs import config, metrics
from tests.helpers.samplers import groups_of
from tests.helpers.scripts import run_script

FLAGS = {"prompts_per_step": 4, "max_completion_length": 40, "learning_rate": 1e-3, "report_every": 0}


def sft_config(model: str, data, output, **flags) -> sft.Config:
    return sft.Config(task="count", model=model, data=str(data), output=str(output), **(FLAGS | flags))


@pytest.fixture
def rows(shapes, tmp_path):
    """Write rows of messages, of which the first two and the next three share their prompts."""
    image, other = (f"{shapes}/images/0000{i}.png" for i in range(2))
    questions = [("How many?", [image])] * 2 + [("And now?", [other])] * 3 + [("How much is 1 + 1?", [])]
    answers = ["three", "<think>I see.</think> 4", "five", "six of them", "7", "2"]
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for (question, images), answer in zip(questions, answers):
            turns = [{"role": "user", "content": "<image>" * len(images) + question}]
            turns.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": turns, "images": images}) + "\n")
    return path


@needs("parts/convert")
def test_a_fraction_of_the_pictures_is_held_out(tiny_model, rows, tmp_path):
    """Of three prompts, each with all its answers, two are left to train on."""
    stream, held_out, *_ = sft.read_inputs(sft_config(tiny_model, rows, tmp_path / "run", eval_data="0.34"))
    assert (len(stream.samples), len(held_out)) == (2, 1)
    assert held_out[0].texts not in [sample.texts for sample in stream.samples]


@pytest.mark.parametrize("budget", [30, 10000])
def test_loss_and_gradient_are_those_of_transformers(tiny_model, rows, tmp_path, budget):
    """With several answers in a packed sequence and with one, the same to 1e-6."""
    flags = dict(prompts_per_step=3, micro_batch_tokens=budget, train_vision=True, dtype="float32")
    run = sft.start(sft_config(tiny_model, rows, tmp_path / "run", **flags), sft.read_inputs, sft.Answers)
    groups = run.collector.collect(run.policy, 0)
    assert sorted(len(group.completions) for group in groups) == [1, 2, 3]
    loss = sum(grpo.backward(run, batch)[0]["loss"] for batch, _ in micro_batches(run.policy, groups, budget))

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    processor = load_processor(tiny_model, "count")
    samples = load_samples(str(rows), None)
    encoded = [(encode_prompt(s, processor), encode_response(s, s.responses[0], processor)) for s in samples]
    tokens = sum(len(response) for _, response in encoded)
    expected = 0.0
    for prompt, response in encoded:
        ids = torch.cat([prompt.ids, response])[None]
        labels = ids.clone()
        labels[:, : len(prompt.ids)] = -100
        inputs = dict(prompt.vision)
        if inputs:
            inputs["mm_token_type_ids"] = (ids == prompt.image_token).int()
        part = model(input_ids=ids, labels=labels, **inputs).loss * (len(response) / tokens)
        part.backward()
        expected += part.item()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    theirs = dict(model.named_parameters())
    for name, parameter in run.policy.model.named_parameters():
        gradient = theirs[name].grad
        if gradient is not None:
            assert (local_tensor(parameter.grad) - gradient).abs().max() < 1e-6, name


def test_answers_are_encoded_before_the_first_step(tiny_model, rows, tmp_path, monkeypatch):
    """Between two steps, the GPU would wait for that. Each prompt has the answers of its rows, in their order."""
    cfg = sft_config(tiny_model, rows, tmp_path / "run", prompts_per_step=3, eval_data=str(rows))
    run = sft.start(cfg, sft.read_inputs, sft.Answers, sft.held_out_loss)
    monkeypatch.delattr(sft, "encode_response")
    decode = run.collector.stream.processor.tokenizer.decode
    groups = run.collector.collect(run.policy, 0)
    answers = sorted([decode(each.ids).removesuffix("<|im_end|>") for each in group.completions] for group in groups)
    assert answers == [["2"], ["five", "six of them", "7"], ["three", "<think>I see.</think> 4"]]
    assert {each.ids.dtype for group in groups for each in group.completions} == {torch.int64}
    assert sft.held_out_loss(run, run.loop.eval_samples)["eval/loss"] > 0


def test_an_answer_is_trained_on_as_it_stands_with_its_end(tiny_model, rows):
    processor = load_processor(tiny_model, "count")
    texts = [
        processor.tokenizer.decode(encode_response(sample, sample.responses[0], processor))
        for sample in load_samples(str(rows), None)
    ]
    assert texts[:2] == ["three<|im_end|>", "<think>I see.</think> 4<|im_end|>"]


def test_short_answers_and_answers_after_an_opened_block_are_what_they_are(tiny_model, rows):
    """An answer may be a piece of the token that ends it. What the template opens is not trained on again."""
    processor, (first, *_) = load_processor(tiny_model, "count"), load_samples(str(rows), None)
    assert processor.tokenizer.decode(encode_response(first, "end", processor)) == "end<|im_end|>"
    processor.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    got = processor.tokenizer.decode(encode_response(first, "<think>I see.</think> 4", processor))
    assert got == "I see.</think> 4<|im_end|>"
    with pytest.raises(ValueError, match="does not begin with '<think>'"):
        encode_response(first, "4", processor)
    with pytest.raises(ValueError, match="its answer is empty"):
        encode_response(first, " ", processor)


@pytest.mark.parametrize("ending", ["<think>\n\n</think>\n\n", "<think></think>\n", "<think></think><answer>"])
def test_an_answer_has_no_thought_after_one_that_the_template_has_closed(tiny_model, rows, ending):
    processor, (first, *_) = load_processor(tiny_model, "count"), load_samples(str(rows), None)
    processor.tokenizer.chat_template += f"{{% if add_generation_prompt %}}{{{{ {ending!r} }}}}{{% endif %}}"
    opening = "<answer>" * ending.endswith("<answer>")
    assert processor.tokenizer.decode(encode_response(first, f"{opening}4", processor)) == "4<|im_end|>"
    with pytest.raises(ValueError, match="its answer has a thought, but the chat template has ended it"):
        encode_response(first, f"{opening}<think>I see.</think> 4", processor)


@needs("parts/convert")
@needs("parts/formats")
def test_a_column_response_is_trained_on_and_survives_a_conversion(tiny_model, tmp_path):
    from parts import convert

    row = {"prompt": "?", "answer": "4", "response": "<think>one, two</think> 4"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    convert.convert(convert.Config("convert", str(tmp_path / "d.jsonl"), str(tmp_path / "e.jsonl")))
    for name in ("d", "e"):
        (sample,) = load_samples(str(tmp_path / f"{name}.jsonl"), None)
        assert (sample.answer, sample.responses) == ("4", ["<think>one, two</think> 4"])


def test_a_run_is_resumed_with_its_own_answers_and_command_alone(tiny_model, rows, shapes, tmp_path):
    sft.main(sft_config(tiny_model, rows, tmp_path / "run", max_steps=1))
    rows.write_text(rows.read_text().replace("I see.", "I saw."))
    with pytest.raises(UserError, match=r"belongs to another run .*rows_digest"):
        sft.main(sft_config(tiny_model, rows, tmp_path / "run", max_steps=2, resume="newest"))
    flags = dict(max_steps=2, resume="newest", num_generations=2)
    with pytest.raises(UserError, match=r"belongs to another run .*loss_type was sft, is grpo"):
        grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags))


def test_a_resumed_run_is_the_uninterrupted_one(tiny_model, shapes, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = dict(save_every=2, eval_data=shapes, eval_every=2, lora_rank=4)
    for output, steps, resume in ((whole, 4, None), (halves, 2, None), (halves, 4, "newest")):
        sft.main(sft_config(tiny_model, shapes, output, max_steps=steps, resume=resume, **flags))
    a, b = metrics(whole), metrics(halves)
    assert a[-1] == b[-1] and a[-1]["eval/loss"] < a[0]["eval/loss"]
    adapters = [(f / "final" / "adapter_model.safetensors").read_bytes() for f in (whole, halves)]
    assert adapters[0] == adapters[1]


def test_grpo_begins_with_the_adapter(tiny_model, shapes, tmp_path):
    """Two commands: supervised fine-tuning, then GRPO."""
    flags = [f"--{name}={value}" for name, value in FLAGS.items()]
    command = ["sft.py", "--task=count", f"--model={tiny_model}", f"--data={shapes}", "--lora_rank=4", *flags]
    done = run_script(*command, f"--output={tmp_path}/sft", "--max_steps=2", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    grpo.main(config(tiny_model, shapes, tmp_path / "run", adapter=f"{tmp_path}/sft/final", max_steps=1))
    before, after = (
        (tmp_path / folder / "final" / "adapter_model.safetensors").read_bytes() for folder in ("sft", "run")
    )
    assert len(before) == len(after) and before != after


@needs("parts/formats")
@pytest.mark.parametrize("prompts", [1, 3])
def test_two_processes_make_the_same_run(prompts, tiny_model, rows, tmp_path):
    """A step of one prompt leaves one of the processes without any; with three, both have answers to count."""
    flags = [f"--{name}={value}" for name, value in (FLAGS | {"max_steps": 3, "prompts_per_step": prompts}).items()]
    for processes in (0, 2):
        command = ["sft.py", "--task=count", f"--model={tiny_model}", f"--data={rows}", *flags]
        done = run_script(*command, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in two], rel=1e-3, abs=1e-5)


def test_rows_that_cannot_be_trained_on_are_named(tiny_model, rows, tmp_path):
    with pytest.raises(
        UserError,
        match=r"rows.jsonl row 2: its answer has \d+ tokens; --max_completion_length is 12; .*--skip_bad_rows",
    ):
        sft.main(sft_config(tiny_model, rows, tmp_path / "a", max_completion_length=12))
    with pytest.raises(UserError, match="6 of 6 answers cannot be used"):
        sft.main(sft_config(tiny_model, rows, tmp_path / "a", max_completion_length=1, skip_bad_rows=True))
    with rows.open("a") as file:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a<|im_end|>b"}]
        file.write(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(UserError, match="row 7: its answer contains a control token"):
        sft.main(sft_config(tiny_model, rows, tmp_path / "b"))


NEXT_ROLE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501
ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501


def test_a_base_model_learns_an_end_at_which_it_stops(tmp_path):
    """As of Qwen2.5 and Qwen3 bases: the chat template ends an answer with <|im_end|>, but only another token stops."""
    base = end_with(save_tiny("qwen2_5", tmp_path / "base"), "<|vision_end|>")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Say 4.", "answer": "4"}) + "\n")
    template = tmp_path / "t.jinja"
    template.write_text("{{ content }}")
    flags = dict(template=str(template), prompts_per_step=1, max_completion_length=4, learning_rate=1e-2, max_steps=25)
    sft.main(sft_config(base, tmp_path / "rows.jsonl", tmp_path / "sft", **flags))
    end = transformers.AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|im_end|>")
    final = tmp_path / "sft" / "final"
    assert end in transformers.GenerationConfig.from_pretrained(final).eos_token_id
    processor = load_processor(str(final), "vqa", str(template))
    engine = HFEngine(load_model(str(final), torch.float32).eval(), processor.tokenizer)
    prompt = encode_prompt(make_sample("Say 4.", "4", [], "row 1"), processor)
    ((rollout,),) = groups_of(engine, [prompt], [0], Sampling(n=1, temperature=0, max_tokens=4))
    assert rollout.finished and processor.tokenizer.decode(rollout.ids) == "4<|im_end|>"


def test_where_the_next_role_ends_a_turn_answers_end_with_it(tmp_path):
    """As of GLM, whose end tokens are <|user|> and <|observation|>."""
    folder, names = save_tiny("glm4v", tmp_path / "m"), ["<|user|>", "<|assistant|>"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = NEXT_ROLE
    tokenizer.save_pretrained(folder)
    processor = load_processor(folder, "vqa")
    ids = encode_response(make_sample("How many?", "3", [], "row 1"), "3", processor)
    assert processor.tokenizer.decode(ids) == "3<|user|>"
    assert ids[-1] in stop_tokens(None, load_config(folder), processor.tokenizer)
    processor.tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}" + NEXT_ROLE
    )
    assert answer_end(processor.tokenizer) == ("", "<|user|>")
    processor.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="ends an answer with no control token"):
        encode_response(make_sample("How many?", "3", [], "row 1"), "3", processor)


def test_an_answer_has_the_tokens_that_it_has_in_the_chat(tmp_path):
    """Guards against `▁3` for `3`: a SentencePiece tokenizer puts a blank before a text that begins."""
    folder = save_tiny("llama", tmp_path / "m")
    names = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*names, *map(chr, range(32, 127)), "\n", "▁", "▁3"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "3")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    ends = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>", "chat_template": ROLES}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    processor = load_processor(folder, "vqa")
    ids = encode_response(make_sample("How many?", "3", [], "row 1"), "3", processor)
    assert processor.tokenizer.convert_ids_to_tokens(ids) == ["3", "</s>"]


def test_answers_for_which_the_reward_gives_nothing_are_told(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """The reward is asked: one of a plugin, with the default format, may give bare answers full marks."""
    row = {"prompt": "How much is 1 + 2?", "answer": "3", "images": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "mine.py").write_text("def same(completion, answer, **_):\n    return float(completion == answer)\n")
    for name in ("_modules", "_digests"):
        monkeypatch.setattr(plugins, name, {})
    same = plugins.import_file(str(tmp_path / "mine.py")).same
    for name, reward in (("same", same), ("never", vqa_reward)):
        monkeypatch.setitem(TASKS, name, Task(reward, template="{{ content }}"))
    expected = "the reward of --task {} gives nothing for the answers, such as '3': see docs/sft.md"
    for task, is_told in (("same", False), ("count", False), ("never", True), ("vqa", True), ("math", True)):
        cfg = replace(sft_config(tiny_model, tmp_path / "rows.jsonl", tmp_path), task=task)
        sft.load_answers(cfg, cfg.data, data.processor_for(cfg))
        assert (expected.format(task) in capsys.readouterr().err) == is_told, task
