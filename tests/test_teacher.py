"""A teacher in the advantages: the gradient of the reverse KL, a teacher that sees more, and what is refused."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import grpo
from common.errors import UserError
from common.files import read_jsonl
from data import encode_prompt, load_processor, load_samples
from tests.helpers import tiny
from tests.helpers.models import plain_logprobs
from tests.helpers.runs import SMALL, config, difference
from tests.helpers.scripts import run_script


def test_the_gradient_is_that_of_the_reverse_kl():
    """All completions of two tokens over a vocabulary of five, each with its probability, in float64."""
    g = torch.Generator().manual_seed(0)
    first, second, teacher_first, teacher_second = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((5,), (5, 5)) * 2
    )

    def log_softmax(*logits):
        return [each.log_softmax(-1) for each in logits]

    def logps(one, two):  # (25, 2): of both tokens of each completion
        pairs = list(itertools.product(range(5), repeat=2))
        return torch.stack([torch.stack([one[a], two[a, b]]) for a, b in pairs])

    ours = [first.requires_grad_(), second.requires_grad_()]
    logp = logps(*log_softmax(*ours))
    teacher_logp = logps(*log_softmax(teacher_first, teacher_second))
    probability = logp.sum(1).exp().detach()[:, None].expand(25, 2)
    zeros, none = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.bool)
    values = SimpleNamespace(
        sampling_logp=logp.detach().flatten(),
        advantages=zeros,
        token_weights=probability.flatten(),
        has_image=none,
        stale=none,
        trainer_logp=None,
        ref_logp=None,
        teacher_logp=teacher_logp.flatten(),
        per_token=False,
    )
    cfg = grpo.Config(data="x", teacher="t")
    grpo.resolve_loss(cfg)
    batch = SimpleNamespace(values=values, completion_of_token=torch.arange(25).repeat_interleave(2))
    loss, stats = grpo.batch_loss(cfg, batch, logp.flatten())
    got = torch.autograd.grad(loss, ours)

    one, two = log_softmax(*ours)
    kl_first = (one.exp() * (one - teacher_first.log_softmax(-1))).sum()
    kl_second = (two.exp() * (two - teacher_second.log_softmax(-1))).sum(1)  # after each first token
    kl = kl_first + (one.exp().detach() * kl_second).sum()
    for mine, expected in zip(got, torch.autograd.grad(kl, ours)):
        assert (mine - expected).abs().max() < 1e-6
    assert stats["teacher_kl"] / 25 == pytest.approx((logp - teacher_logp).sum().item() / 25)


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory) -> str:
    """Return a model of the same family and vocabulary with other weights."""
    return tiny.save_model(tmp_path_factory.mktemp("other") / "model", seed=1)


STUDENT_SEES = {  # less than the teacher; of `teacher_images`, their columns say so
    "max_pixels": dict(min_pixels=56 * 56, max_pixels=56 * 56, teacher_pixels=84 * 84),
    "teacher_images": {},
}


@pytest.mark.parametrize("student_sees", STUDENT_SEES)
def test_a_teacher_sees_its_own_pictures(tiny_model, other_model, shapes, tmp_path, student_sees):
    """The student sees 56 x 56 pixels, the teacher 84 x 84; completions are aligned by their own tokens."""
    rows = [{"prompt": "<image>How many?", "answer": "1", "images": [f"{shapes}/images/00000.png"]}]
    if student_sees == "teacher_images":
        small = tmp_path / "small.png"
        Image.open(rows[0]["images"][0]).resize((56, 56)).save(small)
        rows[0] |= {"images": [str(small)], "teacher_images": [f"{shapes}/images/00000.png"]}
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(prompts_per_step=1, teacher=other_model, dtype="float32")
    flags |= STUDENT_SEES[student_sees]
    cfg = config(tiny_model, str(tmp_path / "d.jsonl"), tmp_path / "run", **flags)
    run = grpo.set_up(cfg)
    groups, rewards = run.collector.collect(run.policy, grpo.advantages_of, 0)
    advantages = grpo.advantages_of(rewards, run.collector.scorer.all_weights, cfg)
    minibatch = run.updater.balance(grpo.training_groups(cfg, groups, advantages))
    ((group,),) = run.updater.with_logprobs(run.teacher, [minibatch], "teacher_logp")
    assert len(group.prompt.for_teacher.image_indices) > len(group.prompt.image_indices) > 0

    teacher = AutoModelForImageTextToText.from_pretrained(other_model, dtype=torch.float32)
    (sample,) = load_samples(str(tmp_path / "d.jsonl"), "count")
    prompt = encode_prompt(sample.for_teacher, load_processor(other_model, "count"))
    for completion in group.completions:
        with torch.no_grad():
            expected = plain_logprobs(teacher, SimpleNamespace(prompt=prompt), completion.ids)
        assert (completion.teacher_logp - expected).abs().max() < 1e-5


def test_a_new_adapter_is_taught_by_its_own_base_without_a_second_copy(tiny_model, shapes, tmp_path):
    flags = dict(teacher=tiny_model, lora_rank=4, max_steps=2, reward=("count=0",), num_generations=1)
    cfg = config(tiny_model, shapes, tmp_path / "run", **flags)
    run = grpo.set_up(cfg)
    assert run.teacher is run.policy
    run.loop.train(run, grpo.train_step)
    first, _ = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first["teacher_kl"] == pytest.approx(0, abs=1e-6), "the adapter begins as its base"


def test_a_run_with_a_teacher_resumes_and_learns_from_it(tiny_model, other_model, shapes, tmp_path):
    """Groups of one, whose reward has the weight 0, and a KL term beside the teacher."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = dict(teacher=other_model, reward=("count=0",), num_generations=1, beta=0.001, save_every=4)
    flags |= dict(prompts_per_step=12, max_completion_length=24)
    for output, steps, resume in ((whole, 8, None), (halves, 4, None), (halves, 8, "newest")):
        grpo.main(config(tiny_model, shapes, output, max_steps=steps, resume=resume, **flags))
    assert difference(whole / "checkpoint-8", halves / "checkpoint-8", tmp_path) == 0
    rows = read_jsonl(whole / "metrics.jsonl")
    assert rows[-1]["teacher_kl"] < 0.8 * rows[0]["teacher_kl"]


def test_in_a_step_of_several_updates_the_policy_is_that_before_the_first(tiny_model, other_model, shapes, tmp_path):
    flags = dict(teacher=other_model, old_logp="sampler", num_iterations=2, max_steps=1)
    grpo.main(config(tiny_model, shapes, tmp_path, **flags))
    assert "time/old_logp" in read_jsonl(tmp_path / "metrics.jsonl")[0]


@pytest.mark.slow  # as tests/test_runs.py shows without a teacher
def test_two_processes_make_the_same_run(tiny_model, other_model, shapes, tmp_path):
    chosen = dict(teacher=other_model, max_steps=2, num_iterations=2, micro_batch_tokens=300, loss_type="gspo")
    for processes in (0, 2):
        flags = [f"--{name}={value}" for name, value in (SMALL | chosen | {"learning_rate": 1e-3}).items()]
        command = ["grpo.py", f"--model={tiny_model}", f"--data={shapes}", *flags, "--teacher_pixels=3136"]
        done = run_script(*command, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    for name in ("loss", "teacher_kl", "grad_norm"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in two], rel=1e-3, abs=1e-5)


def test_teachers_that_cannot_teach_are_refused(tiny_model, shapes, tmp_path):
    tokenizer = tiny.load_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tiny.save_model(tmp_path / "other", seed=1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"has another vocabulary than --model .*'<extra>'"):
        grpo.main(config(tiny_model, shapes, tmp_path / "a", teacher=str(tmp_path / "other")))
    with pytest.raises(UserError, match="every reward has the weight 0"):
        grpo.main(config(tiny_model, shapes, tmp_path / "b", reward=("count=0",)))
    with pytest.raises(UserError, match="--num_generations 1: rewards are compared within a group"):
        grpo.main(config(tiny_model, shapes, tmp_path / "c", teacher=tiny_model, num_generations=1))
    alone = dict(teacher=tiny_model, reward=("count=0",))
    for flag in ({"dynamic_sampling_rounds": 3}, {"overlong_buffer": 5}, {"advantage": "gdpo"}):
        with pytest.raises(UserError, match=f"--{next(iter(flag))}.* needs a reward"):
            grpo.main(config(tiny_model, shapes, tmp_path / "c", **alone, **flag))
    with pytest.raises(UserError, match=r"--teacher .*nowhere"):
        grpo.main(config(tiny_model, shapes, tmp_path / "c", teacher=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="would be replaced by this run"):
        grpo.main(config(tiny_model, shapes, tmp_path / "c", teacher=str(tmp_path / "c" / "final")))
    with pytest.raises(ValueError, match="teacher_pixels needs a teacher"):
        config(tiny_model, shapes, tmp_path / "d", teacher_pixels=100)
    thin = tmp_path / "thin.png"
    Image.new("RGB", (3000, 4)).save(thin)
    row = {"prompt": "<image>?", "answer": "1", "images": [f"{shapes}/images/00000.png"], "teacher_images": [str(thin)]}
    (tmp_path / "thin.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"thin.jsonl row 1: .*200 times"):
        grpo.main(config(tiny_model, str(tmp_path / "thin.jsonl"), tmp_path / "e", teacher=tiny_model))
    row = {"prompt": "<image>?", "answer": "1", "images": [f"{shapes}/images/00000.png"]}
    (tmp_path / "d.jsonl").write_text(json.dumps(row | {"teacher_images": row["images"]}) + "\n")
    with pytest.raises(UserError, match="row 1 has 'teacher_images', and there is no --teacher"):
        grpo.main(config(tiny_model, str(tmp_path / "d.jsonl"), tmp_path / "e"))
