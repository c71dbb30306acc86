"""The lesson: its one file is the full code's algorithm, its exercises can be solved, its notebook runs."""

import ast
import copy
import csv
import dataclasses
import importlib
import json
import pathlib
import re
import runpy
import shutil
import sys
import types
import typing

import pytest
import torch

import grpo
import rewards
from common.records import Completion, Group, Rewards, Rollout, ScoredGroup
from config import Config
from data import encode_prompts, load_processor, load_samples
from packing import pack
from policy.forward import enable_packed_forward
from policy.model import Policy
from tests.helpers.scripts import run_script

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")
pytest.importorskip("lesson.check", reason="needs lesson/, which is not here")

from apps.demo import tiny
from lesson import check, figures, make_notebook
from lesson import grpo_at_speed as at_speed
from lesson import grpo_in_one_file as one_file

LESSON = pathlib.Path(__file__).parent.parent / "lesson"
README = (LESSON / "README.md").read_text()


@pytest.fixture(scope="module")
def built(tiny_model, tmp_path_factory) -> pathlib.Path:
    """Return a folder as apps/demo/tiny.py writes it, whose model has random weights."""
    folder = tmp_path_factory.mktemp("lesson") / "count-0"
    tiny.write_shapes(folder / "train", 12, [0, 0])
    tiny.write_shapes(folder / "test", 4, [0, 1])
    shutil.copytree(tiny_model, folder / "model")
    return folder


@pytest.mark.parametrize("flags", [{"advantage": "no_std"}, {"beta": 0.05, "iterations": 2}])
def test_one_file_and_full_code_have_the_same_loss_and_gradient(built, flags):
    """The same rows, completions and rewards; the sampler's log-probabilities are off, so that they matter."""
    settings = one_file.Settings(data=str(built), seed=1, group=3, max_tokens=8, **flags)
    task, model = one_file.load_task(settings), one_file.load_model(settings.data)
    torch.manual_seed(1)
    inputs = one_file.encode(task, "train", task.rows["train"][:2])
    done = one_file.sample(model, task, inputs, settings.group, settings.max_tokens)
    done.mask[::2, 5:] = False  # completions of different lengths
    noise = torch.randn_like(done.sampling_logp)
    done.sampling_logp += 0.5 * noise
    old, ref = done.sampling_logp + 0.3 * noise.flip(0), done.sampling_logp - 0.2 * noise.flip(1)
    scores = torch.rand(2, settings.group)

    logp = one_file.token_logp(model, inputs, done, torch.arange(2 * settings.group))
    if settings.iterations == 1:
        old = logp.detach()
    advantages = one_file.group_advantages(scores, settings.advantage).view(-1, 1)
    per_token = one_file.grpo_loss(logp, old, done.sampling_logp, ref, advantages, settings)
    loss = (one_file.token_weights(done.mask) * per_token).sum()
    loss.backward()

    cfg = Config(data="-", beta=settings.beta, num_iterations=settings.iterations, num_generations=settings.group)
    cfg.importance_cap, cfg.max_completion_length = settings.importance_cap, settings.max_tokens
    cfg.advantage = {"group": "group", "no_std": "none"}[settings.advantage]
    grpo.resolve_loss(cfg)
    full_model = copy.deepcopy(model)
    full_model.zero_grad()
    enable_packed_forward(full_model)
    batch = pack(full_groups(cfg, built, done, scores, old, ref))
    full_logp, _ = Policy(full_model)(batch)
    full_loss, _ = grpo.batch_loss(cfg, batch, full_logp)
    full_loss.backward()
    torch.testing.assert_close(full_logp, logp[done.mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(full_loss, loss, rtol=0, atol=1e-6)
    ours = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert len(ours) > 30
    for name, weight in full_model.named_parameters():
        if name in ours:
            torch.testing.assert_close(weight.grad, ours[name], rtol=0, atol=1e-6, msg=name)


def full_groups(cfg, built, done, scores, old, ref) -> list[Group]:
    """Return the one file's completions as the full code's groups, made from the same folder."""
    samples = load_samples(str(built / "train"), "count")[:2]
    prompts = encode_prompts(samples, load_processor(str(built / "model"), "count"))
    scored, size = [], cfg.num_generations
    for i, (sample, prompt) in enumerate(zip(samples, prompts)):
        rows = range(i * size, (i + 1) * size)
        rollouts = [Rollout(done.ids[row][done.mask[row]], done.sampling_logp[row][done.mask[row]]) for row in rows]
        scored.append(ScoredGroup(sample, prompt, rollouts, [Rewards(r, r) for r in scores[i].tolist()], i))
    groups = grpo.training_groups(cfg, scored, grpo.group_advantages(scores, cfg.advantage))
    of_row = iter(range(len(done.ids)))

    def with_logp(completion: Completion) -> Completion:
        row = next(of_row)
        mask = done.mask[row]
        later = old[row][mask] if cfg.num_iterations > 1 else None
        return Completion(
            completion.ids,
            completion.sampling_logp,
            completion.advantage,
            completion.token_weight,
            0,
            later,
            ref[row][mask] if cfg.beta else None,
        )

    return [Group(group.prompt, [with_logp(each) for each in group.completions], group.index) for group in groups]


@pytest.mark.parametrize("number", check.CHECKS)
def test_an_exercise_is_right_when_solved_and_not_before(number):
    assert check.check(number, "solutions") is None
    assert "write `" in check.check(number)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_exercise_on_tensors_has_torch(number):
    """Without the import, `torch.minimum` in the obvious answer ended in a NameError."""
    assert importlib.import_module(f"lesson.exercises.{check.CHECKS[number][0]}").torch is torch


# A mistake that a reader may make, in place of a piece of the solution: each check has to find it.
MISTAKES = [
    (1, "<= 1e-6", "== 0"),
    (1, "<= 1e-6", "< -1"),
    (1, "len(rewards) - 1", "len(rewards)"),
    (2, "minimum", "maximum"),
    (2, "- objective", "+ objective"),
    (2, "1 - clip, 1 + clip", "0, 1 + clip"),
    (2, "ref_logp - logp", "logp - ref_logp"),
    (3, "range(prompt, prompt + length)", "range(len(found), len(found) + length)"),
    (3, ".tril()", ""),
    (3, "start += length", "start += 0"),
    (4, ".clamp(max=cap)", ""),
    (4, ".mean()", ".sum() / weights.sum()"),
    (4, "policy_logp - sampler_logp", "sampler_logp - policy_logp"),
    (5, "== {str(digit)}", "!= set()"),
    (5, "< 1", "< 0"),
    (5, "float(set", "float(str(digit) in thought or set"),
]


@pytest.mark.parametrize(("number", "right", "wrong"), MISTAKES)
def test_the_checks_find_mistakes(number, right, wrong):
    name, its_check = check.CHECKS[number]
    source = (LESSON / "solutions" / f"{name}.py").read_text()
    assert right in source
    module = types.ModuleType(name)
    exec(source.replace(right, wrong), module.__dict__)
    with pytest.raises(AssertionError):
        its_check(module)


def test_the_notebook_runs_and_is_the_one_file(built):
    short = f"Settings(data={str(built)!r}, steps=1, prompts=2, group=2, max_tokens=4, eval_rows=2)"
    made = make_notebook.make(short)["cells"]
    pictures = [out["data"]["image/png"] for cell in made for out in cell.get("outputs", []) if "data" in out]
    assert len(pictures) == 3 and all(pictures)
    printed = "".join(out["text"] for cell in made for out in cell.get("outputs", []) if "text" in out)
    assert "step 0 seconds" in printed and "step 1 seconds" in printed
    saved = json.loads((LESSON / "grpo.ipynb").read_text())["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in saved] == make_notebook.cells()
    assert sum("image/png" in out.get("data", {}) for cell in saved for out in cell.get("outputs", [])) == 3


def test_every_part_of_the_one_file_is_in_the_notebook():
    text = "\n".join(source for _, source in make_notebook.cells())
    assert all(source in text for source in make_notebook.pieces().values())


def test_the_one_file_imports_four_packages_and_fits_a_few_screens():
    source = (LESSON / "grpo_in_one_file.py").read_text()
    assert len(source.splitlines()) <= 250
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in nodes for alias in node.names if isinstance(node, ast.Import)}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert packages == {"torch", "transformers", "PIL", "numpy"}


def test_the_rewards_of_the_one_file_are_those_of_the_full_code():
    for said in range(9):
        for text in (f"A photo of {said} squares", f"{said}", "none", f"A photo of {said} circles and 2 squares"):
            for gold in range(1, 7):
                answer = f"A photo of {gold} squares"
                assert one_file.count_reward(text, answer) == rewards.count_reward(text, answer)


@pytest.mark.parametrize("kind", ["group", "no_std"])
def test_the_advantages_of_the_one_file_are_those_of_the_full_code(kind):
    """Three times 0.85 have a mean that is not 0.85: their advantages were 0.06."""
    scores = torch.tensor([[0.85, 0.85, 0.85], [1.0, 0.85, 0.7], [0.2, 0.3, 0.3]])
    want = grpo.group_advantages(scores, {"group": "group", "no_std": "none"}[kind])
    torch.testing.assert_close(one_file.group_advantages(scores, kind), want)
    assert not one_file.group_advantages(scores, kind)[0].any()


def test_help_explains_each_setting(monkeypatch, capsys):
    """It takes the comments of `Settings`; without them, it listed bare names."""
    monkeypatch.setattr(sys, "argv", ["grpo_in_one_file.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(LESSON / "grpo_in_one_file.py"), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(one_file.Settings):
        assert re.search(rf"--{field.name} \S+ \S.*? \(default: {re.escape(str(field.default))}\)", said), field.name
    assert "--beta BETA weight of the KL divergence from the initial model (default: 0.0)" in said


def test_a_mistake_ends_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"error: no .*: first run python -m apps.demo.tiny --task count"):
        one_file.load_task(one_file.Settings(data=str(tmp_path / "none")))
    with pytest.raises(SystemExit, match=r"error: --group must be at least 2"):
        one_file.train(one_file.Settings(group=1))


@pytest.mark.slow
def test_the_one_file_learns_to_count(tmp_path):
    """Two minutes on two idle cores, the warm start included."""
    tiny.main(tiny.Config(output=str(tmp_path / "count"), seed=1))
    settings = one_file.Settings(data=str(tmp_path / "count"), seed=1, steps=20, eval_every=20)
    first, *_, last = one_file.train(settings)
    assert first["exact_match"] < 0.6 and last["exact_match"] > 0.9  # 0.949 with two threads, 0.95 and more with one


def test_pages_name_their_exercise_and_link_to_files_that_exist():
    pages = sorted(LESSON.glob("[1-5]_*.md"))
    assert len(pages) == 5
    for number, page in enumerate(pages, start=1):
        text, name = page.read_text(), check.CHECKS[number][0]
        assert f"# {number}. " in text and f"python -m lesson.check {number}\n" in text
        assert f"(exercises/{name}.py)" in text and f"(solutions/{name}.py)" in text and "](figures/" in text
        assert len(text.split()) < 900, "a page takes ten minutes"
        questions, answers = text.partition("## With a pencil\n")[2].partition("</details>")[0].split("<details>")
        items = [re.findall(r"^(\d)\. ", each, re.MULTILINE) for each in (questions, answers)]
        assert items == [[str(i + 1) for i in range(len(items[0]))]] * 2, f"{page.name}: each item begins a line"
    for page in [*pages, LESSON / "README.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (LESSON / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_the_table_names_flags_of_the_one_file_and_shows_the_scores_of_its_curves():
    rows = re.findall(r"^\| `(--.*?)` \| !\[.*?\]\(figures/curve_(\w+)\.png\) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) >= 7
    choices = {field.name: typing.get_args(field.type) for field in dataclasses.fields(one_file.Settings)}
    lines = map(json.loads, (LESSON / "curves.jsonl").read_text().splitlines())
    curves = {line["run"]: [f"{score:.3f}" for score in line["exact_match"]] for line in lines}
    for flags, run, seen in rows:
        for name, value in re.findall(r"--(\w+) (\S+)", flags):
            assert name in choices and (not choices[name] or value in choices[name]), flags
        assert set(re.findall(r"\d\.\d{3}", seen)) <= {*curves[run], *curves["plain"]}, run


def test_each_figure_has_a_function_and_a_place_on_a_page():
    drawn = {path.stem for path in (LESSON / "figures").glob("*.png")}
    curves = {f"curve_{json.loads(line)['run']}" for line in (LESSON / "curves.jsonl").read_text().splitlines()}
    assert {name for name in drawn if not name.startswith("curve_")} == figures.FIGURES.keys() - {"curves"}
    assert {name for name in drawn if name.startswith("curve_")} == curves - {"curve_plain", "curve_seed1"}
    pages = "".join(page.read_text() for page in LESSON.glob("*.md"))
    assert all(f"](figures/{name}.png)" in pages for name in drawn)


# --- the file at speed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_the_file_at_speed_trains_as_the_full_code_does(processes, built, tmp_path):
    """Three steps of two updates on the same completions: the same log-probabilities, losses and weights."""
    with (built / "train" / "main.csv").open() as file:
        drawn = [f"{built}/train/{row['images_path']}" for row in csv.DictReader(file)]
    rows = [{"prompt": "<image>How many?", "answer": "3", "images": [path]} for path in drawn]  # answers may be equal
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tmp_path / "result.json"
    worker = "tests/helpers/at_speed_worker.py"
    run = run_script(worker, built / "model", tmp_path / "rows.jsonl", result, processes=processes)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(result.read_text())
    assert "the gradient is not finite" in found["refused"]
    for apart in found["apart"]:  # with a KL term; without, and an idle process
        assert len(apart["weights"]) == 3 and max(apart["weights"]) < 1e-6
        assert max(apart["loss"]) < 1e-6 and min(apart["changed"]) > 1e-4
        assert max(apart["logp"]) < 1e-5 and min(apart["moved"]) > 1e-4
        assert min(apart["clipped"]) > 0.01 and min(apart["capped"]) > 0.01


GOOD = {"prompt": "<image>How many?", "answer": "3", "images": ["1.png"]}


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"prompt": ', "line 2: Expecting value"),
        ("[1]", "line 2: a row has a prompt and an answer"),
        (json.dumps({"prompt": "How many?"}), "line 2: a row has a prompt and an answer"),
        (json.dumps(GOOD | {"answer": 3}), "line 2: a row has a prompt and an answer"),
        (json.dumps(GOOD | {"images": []}), "line 2: 1 tags <image>, but 0 images"),
        (json.dumps(GOOD | {"images": ["2.png"]}), "line 2: there is no .*2.png"),
        (json.dumps(GOOD | {"images": "1.png"}), "line 2: images must be a list"),
    ],
)
def test_the_file_at_speed_names_the_line_of_a_bad_row(line, problem, tmp_path):
    (tmp_path / "1.png").touch()
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(SystemExit, match=problem):
        at_speed.read_rows(tmp_path / "rows.jsonl")


def test_the_file_at_speed_reads_texts_with_any_line_break(tmp_path):
    row = {"prompt": "one\u2028two", "answer": "3", "images": None}
    (tmp_path / "rows.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\n\n")
    assert at_speed.read_rows(tmp_path / "rows.jsonl") == [row | {"images": []}]
    with pytest.raises(SystemExit, match="is no file"):
        at_speed.read_rows(tmp_path)
    for name in ("save_every", "learning_rate"):
        with pytest.raises(SystemExit, match=f"--{name} must be larger than 0"):
            at_speed.check(at_speed.Settings(**{name: 0}))


def test_the_file_at_speed_says_at_once_that_it_needs_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(at_speed, "check", lambda settings: None)
    monkeypatch.setattr(at_speed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="error: vllm is not installed: pip install vllm"):
        at_speed.train(at_speed.Settings(data=str(tmp_path)), torch.device("cpu"))


def test_the_file_at_speed_places_pictures_at_their_tags():
    (message,) = at_speed.chat_of("A <image>B<image>", 2)
    kinds = [part.get("text", part["type"]) for part in message["content"]]
    assert kinds == ["A ", "image", "B", "image"]
    (message,) = at_speed.chat_of("How many?", 1)
    assert [part["type"] for part in message["content"]] == ["image", "text"]
