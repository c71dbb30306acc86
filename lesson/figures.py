"""Draw the figures of the lesson from real tensors: `python -m lesson.figures`, or with the names of some of them.

It needs runs/tiny/count-0 and runs/tiny/digits-0, which `python -m apps.demo.tiny` writes. Each function draws one
figure, lesson/figures/NAME.png; `curves` draws those of lesson/curves.jsonl, which `collect` writes from your own runs.
`strip digits packed` draw the pictures of README.md in docs/, from the runs of `./run.sh zoom` and `./run.sh digits`.
"""

import copy
import json
import pathlib
import re
import sys
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from PIL import Image

import grpo
from apps.demo import zoom
from common import plugins
from common.environments import tool_call
from common.figures import save_figure
from common.records import Completion, Group, Rollout, Sample, Sampling
from data import Processor, encode_prompts, load_processor, load_samples
from lesson import grpo_in_one_file as one
from lesson.check import attention_of
from packing import PackedBatch, pack
from parts.turns import use_environment
from rewards import vqa_reward
from rollout import sample_completions
from sampling.hf_engine import HFEngine

FOLDER = pathlib.Path(__file__).parent
BLUE, RED, GREY, GREEN = "#2a6fbb", "#c0392b", "#9aa0a6", "#2e8b57"
DOCS = FOLDER.parent / "docs"
FRONT_SIZE = (4.9, 4.2)  # the README shows its pictures at half their size
FRONT_STYLE = plt.rc_context({"font.size": 13, "axes.titlesize": 14, "lines.linewidth": 2.5})
plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})


def start(seed: int = 0, **flags: object) -> tuple[one.Settings, one.Task, torch.nn.Module]:
    """Return settings, task and the model before GRPO."""
    torch.manual_seed(seed)
    settings = one.Settings(**flags)
    return settings, one.load_task(settings), one.load_model(settings.data)


def advantages() -> None:
    """A drawing, eight sampled completions, their rewards and advantages."""
    settings, task, model = start()
    row = next(row for row in task.rows["test"] if " 5 " in row["answer"])
    done = one.sample(model, task, one.encode(task, "test", [row]), 8, settings.max_tokens)
    rewards = torch.tensor([[one.count_reward(text, row["answer"]) for text in done.texts]])
    gains = grpo.group_advantages(rewards)[0].tolist()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.5, 2.2), width_ratios=(1, 1.2, 1.2), layout="tight")
    left.imshow(Image.open(task.folder / "test" / row["images_path"]))
    left.set_title(f"truth: {row['answer'].split(' ', 3)[3]}")
    left.axis("off")
    middle.barh(range(8), rewards[0], color=GREY)
    middle.axvline(rewards.mean(), color="black", linewidth=0.8, linestyle="--")
    middle.set_yticks(range(8), [text.split(" ", 3)[3] for text in done.texts])
    middle.set_title(f"rewards, mean {rewards.mean():.3f}, σ {rewards.std():.3f}")
    right.barh(range(8), gains, color=[GREEN if gain > 0 else RED for gain in gains])
    for i, gain in enumerate(gains):
        right.text(gain, i, f" {gain:+.2f} ", va="center", ha="left" if gain > 0 else "right")
    right.set_xlim(-2.6, 2.6)
    right.set_yticks([])
    right.set_title("advantages = (reward − mean) / σ")
    for axes in (middle, right):
        axes.invert_yaxis()
    save_figure(figure, FOLDER / "figures/advantages.png")


def clip() -> None:
    """The objective against the ratio, real ratios after a step of four updates, and the KL estimate."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.5, 2.4), layout="tight")
    cfg = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    ratio = torch.linspace(0.4, 1.6, 241)
    for advantage, colour in ((1.0, GREEN), (-1.0, RED)):
        objective, clipped = grpo.clipped_objective(ratio.log(), ratio.log(), torch.full((241,), advantage), None, cfg)
        left.plot(ratio.where(~clipped, torch.nan), objective, color=colour, label=f"A = {advantage:+.0f}")
        left.plot(ratio.where(clipped, torch.nan), objective, color=colour, linestyle=":")
    left.set(title="objective (dotted: no gradient)", xlabel="ratio π_θ / π_old")
    left.legend()

    settings, task, model = start(iterations=4, learning_rate=3e-4, prompts=8)
    ratios, loss = [], one.grpo_loss
    one.grpo_loss = lambda logp, old, *rest: ratios.append((logp - old).exp().detach()) or loss(logp, old, *rest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    one.step(model, copy.deepcopy(model), model, optimizer, task, task.rows["train"][:8], settings)
    one.grpo_loss = loss
    last = ratios[-1][ratios[-1] != 1]
    middle.hist(last.clamp(0.4, 1.6).numpy(), bins=48, color=BLUE, log=True)
    for bound in (0.8, 1.2):
        middle.axvline(bound, color="black", linewidth=0.8, linestyle="--")
    outside = ((last < 0.8) | (last > 1.2)).float().mean()
    middle.set(title=f"ratios in the 4th update: {outside:.0%} outside", xlabel="ratio (ends: all beyond)")

    log_ratio = torch.linspace(-1.5, 1.5, 121)  # log π_ref − log π_θ
    right.plot(log_ratio, grpo.kl_estimate(torch.zeros(121), log_ratio), color=BLUE, label="k3 = eᵈ − d − 1")
    right.plot(log_ratio, -log_ratio, color=GREY, linestyle="--", label="k1 = −d")
    right.set(title="KL estimates", xlabel="d = log π_ref − log π_θ")
    right.legend()
    save_figure(figure, FOLDER / "figures/clip.png")


def packed_group() -> PackedBatch:
    """Return a real group of four completions, packed."""
    folder = one.Settings().data
    processor = load_processor(f"{folder}/model", "count")
    prompts = encode_prompts(load_samples(f"{folder}/test", "count")[:1], processor)
    settings, task, model = start()
    done = one.sample(model, task, one.encode(task, "test", task.rows["test"][:1]), 4, settings.max_tokens)
    completions = [Completion(ids[mask], torch.zeros(int(mask.sum()))) for ids, mask in zip(done.ids, done.mask)]
    return pack([Group(prompts[0], completions)])


def draw_attention(axes: plt.Axes, batch: PackedBatch) -> None:
    """Draw who attends to whom in the packed group `batch`."""
    length, prompt = batch.input_ids.shape[1], batch.input_ids.shape[1] - sum(batch.lengths)
    owner = torch.zeros(length).int()
    owner[batch.image_tokens] = 1
    owner[prompt:] = batch.completion_of_token.int() % 2 + 2
    shown = torch.where(attention_of(batch), owner[None] + 1, 0)
    colours = ListedColormap(["white", "#c9d6e8", "#f2b84b", GREEN, "#8fc9a5"])
    axes.imshow(shown, cmap=colours, interpolation="nearest")
    plain = sum(prompt + each for each in batch.lengths)
    axes.set(title=f"who attends to whom: {length} tokens,\nnot {plain}", xlabel="key", ylabel="query")
    axes.text(prompt * 0.25, length * 0.7, "prompt", ha="center")
    axes.annotate("picture", (int(batch.image_tokens[0]), length * 0.9), (prompt * 0.75, length * 0.8))
    axes.text(length * 1.02, prompt, "completions", ha="right", va="bottom")


def packing() -> None:
    """Attention and positions of a real group of four completions."""
    batch = packed_group()
    prompt = batch.input_ids.shape[1] - sum(batch.lengths)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2), width_ratios=(1, 1.3), layout="tight")
    draw_attention(left, batch)
    for name, row, style in zip(("time", "height", "width"), batch.position_ids[:, 0], ("-", "--", ":")):
        right.plot(row, style, label=name, color="black", linewidth=1)
    for first, size in zip([prompt, *(prompt + torch.tensor(batch.lengths).cumsum(0)).tolist()], batch.lengths):
        right.axvspan(first, first + size, color=GREEN, alpha=0.25 if first % 2 else 0.12)
    right.set(title="position of each token (M-RoPE: three rows)", xlabel="packed token")
    right.legend()
    save_figure(figure, FOLDER / "figures/packing.png")


def importance() -> None:
    """Log-probabilities and weights: a sampler that rounds, and one whose weights are three steps old."""
    settings, task, model = start(learning_rate=1e-4)
    stale, rounded = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    rows = task.rows["train"]
    for i in range(3):
        one.step(model, copy.deepcopy(model), model, optimizer, task, rows[16 * i : 16 * i + 16], settings)
    for ours, theirs in zip(rounded.parameters(), model.parameters()):
        ours.data = theirs.data.bfloat16().float()
    figure, panels = plt.subplots(1, 3, figsize=(7.5, 2.5), layout="tight")
    inputs = one.encode(task, "test", task.rows["test"][:24])
    cases = (("weights in bfloat16", rounded, BLUE), ("weights 3 steps old", stale, RED))
    for (name, sampler, colour), panel in zip(cases, panels):
        done = one.sample(sampler, task, inputs, 8, settings.max_tokens)
        with torch.no_grad():
            logp = one.token_logp(model, inputs, done, torch.arange(len(done.ids)))
        ours, theirs = logp[done.mask], done.sampling_logp[done.mask]
        panel.plot(theirs.exp(), ours.exp(), ".", color=colour, markersize=2)
        panel.plot([0, 1], [0, 1], color="black", linewidth=0.5)
        off = (ours - theirs).abs().mean()
        panel.set(title=f"{name}: {off:.4f} nats", xlabel="probability, sampler", ylabel="probability, trainer")
        weights = (ours - theirs).exp()
        label = f"{name}: mean {weights.mean():.3f}"
        panels[2].hist(weights.clamp(max=3).numpy(), bins=60, log=True, color=colour, alpha=0.6, label=label)
    panels[2].axvline(2, color="black", linewidth=0.8, linestyle="--")
    panels[2].set(title="importance weight, cap 2", xlabel="trainer / sampler")
    panels[2].legend(fontsize=6)
    save_figure(figure, FOLDER / "figures/importance.png")


def greedy(model: str, samples: list[Sample], processor: Processor) -> list[Rollout]:
    """Return the greedy completion of the model in the folder `model` for each sample."""
    policy = one.transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    prompts = encode_prompts(samples, processor)
    engine, episodes = HFEngine(policy, processor.tokenizer), processor.environment.episodes(samples, processor)
    seeds, how = [0] * len(samples), Sampling(1, 64, 0.0)
    rollouts = sample_completions(engine.generate, processor, prompts, seeds, how, episodes)
    return [rollout for (rollout,) in rollouts]


def hacking() -> None:
    """Pictures whose digit is misread, and answers that earn the full reward all the same."""
    folder = "runs/tiny/digits-0"
    processor = load_processor(f"{folder}/model", "vqa")
    samples = load_samples(f"{folder}/test/data.jsonl", "vqa")
    samples = [sample for sample in samples if sample.prompt.endswith("even?")]
    counts, examples = {"right": [0] * 10, "right by accident": [0] * 10, "wrong": [0] * 10}, {}
    for sample, rollout in zip(samples, greedy(f"{folder}/model", samples, processor)):
        text = rollout.text
        digit, said = sample.fields["digit"], re.search(r"like a (\d)", text)
        earned = vqa_reward(text, sample.answer) == 1
        kind = "wrong" if not earned else "right" if said and int(said[1]) == digit else "right by accident"
        counts[kind][digit] += 1
        if kind == "right by accident":
            examples.setdefault(digit, (sample, text))
    figure, panels = plt.subplots(1, 4, figsize=(7.5, 2.3), width_ratios=(1, 1, 1, 2.2), layout="tight")
    for digit, panel in zip((1, 0, 9), panels):
        sample, text = examples[digit]
        panel.imshow(Image.open(sample.images[0]), cmap="gray")
        panel.set_title(text.replace("</think>", "\n</think>").replace("<think>", "<think>\n"), fontsize=6)
        panel.set_xlabel(f"a {digit}: reward {vqa_reward(text, sample.answer):g}")
        panel.set(xticks=[], yticks=[])
    below = [0] * 10
    for (kind, bars), colour in zip(counts.items(), (GREEN, "#f2b84b", RED)):
        panels[3].bar(range(10), bars, bottom=below, color=colour, label=kind)
        below = [a + b for a, b in zip(below, bars)]
    print({kind: sum(bars) for kind, bars in counts.items()}, counts)
    panels[3].set(title='"Is this digit even?", by digit', xticks=range(10))
    panels[3].legend(fontsize=6, loc="upper center", ncols=3, columnspacing=0.8, handlelength=1)
    panels[3].set_ylim(0, 62)
    save_figure(figure, FOLDER / "figures/hacking.png")


@FRONT_STYLE
def strip() -> None:
    """A held-out picture: what the model enlarges and answers before and after `./run.sh zoom`."""
    plugins.import_file("examples/zoom.py")
    folder, side = "runs/tiny/zoom-1", zoom.SEEN**2
    processor = load_processor(f"{folder}/model", "vqa", "recipes/zoom.jinja", min_pixels=side, max_pixels=side)
    processor = use_environment(processor, "zoom", max_turns=2, max_seen=48)
    samples = load_samples(f"{folder}/test/data.jsonl", "vqa")[:60]
    pairs = list(zip(*(greedy(model, samples, processor) for model in (f"{folder}/model", "runs/zoom/final"))))
    right = [[vqa_reward(each.text, sample.answer) == 1 for each in pair] for pair, sample in zip(pairs, samples)]
    print("right before, after:", [sum(each) for each in zip(*right)], "of", len(samples))
    learned = [i for i, each in enumerate(right) if each == [False, True]]
    i = next(i for i in learned if samples[i].answer != "1")  # whose scan is a bar
    figure, panels = plt.subplots(2, 3, figsize=FRONT_SIZE, width_ratios=(1, 1, 0.7))
    figure.subplots_adjust(left=0.01, right=1, bottom=0.02, top=0.9, wspace=0.06, hspace=0.3)
    for episode, (picture, part, said), when, colour in zip(pairs[i], panels, ("before", "after"), (RED, GREEN)):
        _, at = tool_call(episode.trajectory.turns[0].text)
        x, y, width = (zoom.SIZE // zoom.SEEN * value for value in (at["x1"], at["y1"], at["x2"] - at["x1"]))
        picture.imshow(Image.open(samples[i].images[0]))
        picture.add_patch(plt.Rectangle((x, y), width, width, fill=False, edgecolor="white", linewidth=2.5))
        picture.set_title(f"{when}: zoom({at['x1']}, {at['y1']}, …)", loc="left", fontsize=12)
        part.imshow(episode.trajectory.images[0])
        said.text(
            0, 0.5, re.sub(r".*<answer>(.*)</answer>", r"\1", episode.text), color=colour, va="center", weight="bold"
        )
        for axes in (picture, part, said):
            axes.axis("off")
    save_figure(figure, DOCS / "strip.png")
    Image.open(DOCS / "strip.png").convert("RGB").quantize(128).save(DOCS / "strip.png")  # the ground is noise


@FRONT_STYLE
def digits() -> None:
    """Reward and held-out score of `./run.sh digits`."""
    lines = [json.loads(line) for line in pathlib.Path("runs/digits/metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=FRONT_SIZE, layout="tight")
    for name, label, style in (("reward", "reward, sampled", "-"), ("eval/exact_match", "held-out, greedy", "o-")):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points), style, label=label, color=GREY if name == "reward" else BLUE)
    axes.set(title="./run.sh digits", xlabel="step", ylim=(0.4, 1))
    axes.legend(loc="lower right")
    save_figure(figure, DOCS / "digits.png")


@FRONT_STYLE
def packed() -> None:
    """The packed row of four completions alone."""
    figure, axes = plt.subplots(figsize=FRONT_SIZE, layout="tight")
    draw_attention(axes, packed_group())
    save_figure(figure, DOCS / "packed.png")


def collect() -> None:
    """Write lesson/curves.jsonl from the runs of the one file that are in runs/lesson."""
    lines = []
    for path in sorted(pathlib.Path("runs/lesson").glob("*.jsonl")):
        scored = [line for line in map(json.loads, path.read_text().splitlines()) if "exact_match" in line]
        values = {name: [line[name] for line in scored] for name in ("step", "exact_match")}
        lines.append(json.dumps({"run": path.stem} | values) + "\n")
    (FOLDER / "curves.jsonl").write_text("".join(lines))


def curves() -> None:
    """The held-out score of each run of lesson/README.md, over that of the unchanged run."""
    runs = {line["run"]: line for line in map(json.loads, (FOLDER / "curves.jsonl").read_text().splitlines())}
    for name in runs.keys() - {"plain", "seed1"}:
        figure, axes = plt.subplots(figsize=(2.2, 1.3), layout="tight")
        for each, colour in (("plain", GREY), (name, BLUE)):
            axes.plot(runs[each]["step"], runs[each]["exact_match"], color=colour, marker=".")
        axes.set(ylim=(0, 1.03), xlim=(0, 30), yticks=(0, 0.5, 1), xticks=(0, 10, 20, 30))
        save_figure(figure, FOLDER / f"figures/curve_{name}.png")


FIGURES = {function.__name__: function for function in (advantages, clip, packing, importance, hacking, curves)}
FRONT = {function.__name__: function for function in (strip, digits, packed)}

if __name__ == "__main__":
    (FOLDER / "figures").mkdir(exist_ok=True)
    for figure_name in sys.argv[1:] or FIGURES:
        (FIGURES | FRONT | {"collect": collect})[figure_name]()
