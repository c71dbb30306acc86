"""Train a base for three steps in this project, and export and merge the result.

    .venv/bin/python -m tests.elsewhere.train WORK NAME VARIANT

Before each export, the logits of the policy's own weights are written. They are what the export has to give elsewhere.
The VARIANT "base" trains nothing: it writes the inputs, and the logits that this project has for the base. The variants
"untied_…" are adapters of `untying.py`, which are only merged.
"""

import pathlib
import shutil
import sys
from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor

import grpo
import rewards
from data import encode_prompt, load_processor
from merge_lora import merge_lora
from policy.export import export
from policy.lora import adapted_weights
from policy.model import Policy, load_model
from tests.elsewhere.bases import is_float32
from tests.elsewhere.cases import (
    ALIKE,
    BASES,
    MADE_BY,
    MIXTURES,
    UNTYING,
    expected_file,
    folder_of,
    inputs_file,
    untying_adapter,
)
from tests.elsewhere.logits import last_logits
from tests.helpers.models import write_rows
from tests.helpers.rows import make_sample
from training import checkpoint

TASK = "length"
# Random weights sample random text. Its length differs within a group, so that there is a gradient.
rewards.TASKS[TASK] = rewards.Task(lambda completion, answer, **_: len(completion) % 8 / 8, template="{{ content }}")
ONE_TILE = 448 * 448  # pixels: pictures have few tokens
BRIEF = dict(max_steps=3, prompts_per_step=2, num_generations=2, max_completion_length=4, max_pixels=ONE_TILE)
BRIEF |= dict(save_every=0, report_every=0, overwrite=True)
MERGED = {adapter: merged for merged, adapter in MADE_BY.items()}
RATES = {"full": 0.01, "adapter": 0.05, "experts": 0.05}  # they move the logits by more than 0.1


def make_inputs(folder: str) -> dict[str, dict[str, Tensor]]:
    """Return a long text, and if the model sees, a prompt with two pictures."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"text": {"input_ids": torch.randint(1000, 100000, (1, 400), generator=generator)}}
    processor = load_processor(folder, TASK, max_pixels=ONE_TILE)
    if processor.image_processor:
        gradient = Image.linear_gradient("L").convert("RGB")
        pictures = [gradient.resize((140, 112)), gradient.rotate(90).resize((84, 140))]
        prompt = encode_prompt(make_sample("<image>How many? <image>And here?", "1", pictures, "the inputs"), processor)
        kinds = (prompt.ids == prompt.image_token).int()[None]
        inputs["picture"] = {"input_ids": prompt.ids[None], "mm_token_type_ids": kinds, **prompt.vision}
    if "pixel_mask" in inputs.get("picture", {}):
        inputs[ALIKE] = alike_in_both(inputs["picture"])
    return inputs


def alike_in_both(picture: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs of Aria for which transformers 4.57 and 5 compute the same; see `DIFFERS` in cases.py."""
    patches = torch.zeros(7, 7, dtype=torch.bool)
    patches[:4, :5] = True
    mask = picture["pixel_mask"] & patches.repeat_interleave(70, 0).repeat_interleave(70, 1)
    return picture | {"pixel_mask": mask, "vision_feature_layer": torch.tensor(-2)}


def plain_logits(source: str, weights: Iterator[tuple[str, Tensor]], inputs: dict) -> dict[str, Tensor]:
    """Return the logits of the unmodified model at `source` with all its weights replaced by `weights`."""
    model = load_model(source, torch.float32)
    parameters = dict(model.named_parameters())
    for name, weight in weights:
        parameters.pop(name).data.copy_(weight)
    assert not parameters, f"the policy lacks {sorted(parameters)[:3]}"
    return last_logits(model, inputs)


def as_stored(name: str, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` as the files of the base `name` can hold them: those that it has in bfloat16 are rounded."""
    in_bfloat16 = BASES[name].weights == "three shards"
    for key, weight in weights:
        yield key, weight.bfloat16().float() if in_bfloat16 and not is_float32(key) else weight


def train(work: pathlib.Path, name: str, variant: str) -> None:
    """Train and export. Write the logits of the policy's own weights, and as files of the base's dtypes hold them."""
    source, inputs = str(folder_of(work, name, "base")), torch.load(inputs_file(work, name))
    stored = MERGED.get(variant, variant)

    def export_after_logits(policy: Policy, *arguments) -> None:
        if variant != "full":
            own = plain_logits(source, adapted_weights(policy.model), inputs)
            torch.save(own, expected_file(work, name, variant))
        rounded = plain_logits(source, as_stored(name, adapted_weights(policy.model)), inputs)
        torch.save(rounded, expected_file(work, name, stored))
        export(policy, *arguments)

    checkpoint.export = export_after_logits
    rows, output = work / name / f"{variant}-rows", work / name / variant
    rows.mkdir()
    data = write_rows(rows, with_images=bool(BASES[name].image))
    flags = {"train_vision": bool(BASES[name].image)}
    if variant == "full":
        flags["train_router"] = name in MIXTURES
    else:
        flags |= {"train_vision": flags["train_vision"] and BASES[name].tower_adapted}
        flags |= {"lora_rank": 4, "lora_experts": variant == "experts"}
    rate = RATES[variant]
    grpo.main(grpo.Config(model=source, data=data, output=str(output), task=TASK, learning_rate=rate, **BRIEF, **flags))
    for each in output.glob("checkpoint-*"):
        shutil.rmtree(each)
    if variant != "full":
        merge_lora(source, str(output / "final"), str(folder_of(work, name, stored)))


def write_inputs(work: pathlib.Path, name: str) -> None:
    """Write the inputs for all models of the base `name`, and the logits that this project has for the base."""
    source = str(folder_of(work, name, "base"))
    inputs = make_inputs(source)
    inputs_file(work, name).parent.mkdir()
    torch.save(inputs, inputs_file(work, name))
    torch.save(last_logits(load_model(source, torch.float32), inputs), expected_file(work, name, "base"))


def main(work: pathlib.Path, name: str, variant: str) -> None:
    if variant == "base":
        write_inputs(work, name)
    elif variant in UNTYING:
        base, adapter = folder_of(work, name, "base"), untying_adapter(work, name, variant)
        merge_lora(str(base), str(adapter), str(folder_of(work, name, variant)))
    else:
        train(work, name, variant)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), *sys.argv[2:])
