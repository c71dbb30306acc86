"""Draw what a model looks at before and after `./run.sh zoom`: a held-out picture, the part it enlarges, its answer.

    python -m apps.demo.zoom_strip --before runs/tiny/zoom-0/model --after runs/zoom/final \\
        --data runs/tiny/zoom-0/test/data.jsonl --output runs/zoom/strip.png
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import transformers
from matplotlib.patches import Rectangle
from PIL import Image

from apps.demo.zoom import SEEN, SIZE
from common import cli
from common.environments import tool_call
from common.figures import save_figure
from common.records import Rollout, Sample, Sampling
from data import Processor, encode_prompts, load_processor, load_samples, use_environment
from rewards import vqa_reward
from sampling.episodes import as_option
from sampling.hf_engine import HFEngine

ROWS = 64  # held-out rows to choose from
RED, GREEN, YELLOW = "#c0392b", "#2e8b57", "#f2b84b"


@dataclass
class Config:
    """Draw one held-out picture with what two models look at and answer."""

    before: str
    """Model before GRPO."""
    after: str
    """Model after GRPO."""
    data: str
    """Held-out rows."""
    output: str
    """PNG file to write."""


def processor_of(model: str) -> Processor:
    """Return the processor of a model of this demo, with the tool."""
    processor = load_processor(model, "vqa", "recipes/zoom.jinja", min_pixels=SEEN**2, max_pixels=SEEN**2)
    return use_environment(processor, "zoom", max_turns=2, max_seen=48)


def sample_episodes(model: str, samples: Sequence[Sample], processor: Processor) -> list[Rollout]:
    """Return an episode of the model in the folder `model` about each of `samples`, decoded greedily."""
    engine = HFEngine(transformers.AutoModelForImageTextToText.from_pretrained(model), processor.tokenizer)
    prompts, sampling = encode_prompts(samples, processor), Sampling(n=1, max_tokens=24, temperature=0.0)
    groups = engine.generate(prompts, [0] * len(samples), sampling, **as_option(samples, processor))
    return [rollout for (rollout,) in groups]


def draw(panels: Sequence[Any], title: str, sample: Sample, episode: Rollout) -> None:
    """Draw an episode: the picture with the part that was enlarged, the part, and the answer."""
    picture, enlarged, said = panels
    said.text(0, 0.8, title, weight="bold")
    picture.imshow(Image.open(sample.images[0]))
    turns = episode.trajectory.turns
    if len(turns) > 1:
        _, part = tool_call(turns[0].text)
        x1, y1, x2, y2 = (part[name] * SIZE // SEEN for name in ("x1", "y1", "x2", "y2"))
        picture.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=YELLOW, linewidth=2))
        enlarged.imshow(turns[1].content[0])
        said.text(0, 0.5, "zoom({x1}, {y1}, {x2}, {y2})".format(**part))
    is_right = vqa_reward(episode.text, sample.answer) == 1
    said.text(0, 0.2, episode.text.replace("</think>", "</think>\n"), color=GREEN if is_right else RED, va="center")
    for axes in panels:
        axes.axis("off")


def main(cfg: Config) -> None:
    processor = processor_of(cfg.after)
    samples = load_samples(cfg.data, "vqa", processor=processor)[:ROWS]
    before, after = (sample_episodes(model, samples, processor) for model in (cfg.before, cfg.after))
    right = [[vqa_reward(each.text, row.answer) == 1 for each, row in zip(e, samples)] for e in (before, after)]
    learned = [i for i, (was, is_now) in enumerate(zip(*right)) if is_now and not was]
    i = learned[0] if learned else 0
    figure, panels = plt.subplots(2, 3, figsize=(4.9, 3.0), width_ratios=(1, 1, 1.3))
    figure.subplots_adjust(left=0.01, right=1, bottom=0.02, top=0.98, hspace=0.06, wspace=0.06)
    draw(panels[0], "before GRPO", samples[i], before[i])
    draw(panels[1], "after GRPO", samples[i], after[i])
    save_figure(figure, pathlib.Path(cfg.output))
    Image.open(cfg.output).convert("RGB").quantize(128).save(cfg.output)  # a third of the size
    print(f"strip     {cfg.output}")


if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
