"""Every family of models, with tiny random weights: packing, training, adapters, 4 bits, and what is exported.

    RECORD_FAMILIES=docs/results/families.json python -m pytest tests/test_family.py -n0 --slow

writes what was measured to that file, and from it the table in docs/models.md.

Guards against: image features in the wrong places, frozen parts that move, adapters that reach a router or miss the
shared experts, and exported models that transformers or PEFT cannot load.
"""

import copy
import json
import pathlib
import re
import shutil

import peft
import pytest
import torch
import transformers

import evaluate
import grpo
import merge_lora
from common.errors import UserError
from common.files import read_jsonl
from common.records import Completion, Group
from config import PolicyFlags
from data import encode_prompts, load_processor, load_samples
from packing import pack
from policy.base_files import copy_settings
from policy.families import find_family, language_model, load_tokenizer, routers, vision_parts
from policy.forward import enable_packed_forward, token_logprobs
from policy.lora import adapted_layers, adapted_weights
from policy.model import Policy, auto_class, load_config, load_policy
from tests.helpers import models
from tests.helpers.marks import needs, slow
from tests.helpers.models import RECORD, WITH_IMAGES, plain_logprobs, record, save_tiny, write_rows
from tests.helpers.rows import make_sample
from tests.helpers.runs import SMALL, config, weights
from tests.helpers.scripts import run_script

ROOT = pathlib.Path(__file__).parent.parent
COLUMNS = {
    "packed": "packed = plain",
    "gradients": "gradients",
    "full": "full",
    "lora": "LoRA",
    "4-bit": "LoRA, 4-bit",
    "sampler": "transformers sampler",
    "vllm": "vLLM 0.25.1",
}
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory):
    """Return a function that returns the folder of a family's tiny model, made once."""
    folder = tmp_path_factory.mktemp("families")

    def folder_of(family: str) -> str:
        if not (folder / family).exists():
            save_tiny(family, folder / family)
        return str(folder / family)

    return folder_of


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Return a function that returns rows for a family: text, and if it sees, also one and two images per row."""
    folder = tmp_path_factory.mktemp("rows")
    files = {with_images: write_rows(folder, with_images) for with_images in (True, False)}
    return lambda family: files[family in WITH_IMAGES]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_family_packed_equals_plain(family, tiny_family, rows):
    """Prompts from data.py: text, one image, and two images of different sizes in one pack."""
    processor = load_processor(tiny_family(family), "count")
    samples = load_samples(rows(family), "count", processor=processor)[:3]
    prompts = encode_prompts(samples, processor)
    assert [sample.tokens for sample in samples] == [len(prompt.ids) for prompt in prompts]
    g = torch.Generator().manual_seed(0)
    completions = [[torch.randint(0, 200, (n,), generator=g) for n in (4, 1, 6)] for _ in prompts]
    groups = [
        Group(p, [Completion(ids, torch.zeros(len(ids))) for ids in each]) for p, each in zip(prompts, completions)
    ]
    config = load_config(tiny_family(family))
    plain = auto_class(config).from_pretrained(tiny_family(family), dtype=torch.float32)
    models.randomise(plain)
    packed = copy.deepcopy(plain)
    enable_packed_forward(packed)
    want = torch.cat([plain_logprobs(plain, group, c.ids) for group in groups for c in group.completions])
    got, _ = token_logprobs(packed, pack(groups))
    weights = torch.randn(len(want), generator=g)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    differences = [
        (q.grad - p.grad).abs().max() / max(1.0, p.grad.abs().max())
        for p, q in zip(plain.parameters(), packed.parameters(), strict=True)
        if p.grad is not None
    ]
    assert len(differences) > 15
    bounds = models.FAMILIES[family].bounds
    assert (got - want).abs().max() < bounds[0]
    assert max(differences) < bounds[1]
    record(family, "packed", f"{(got - want).abs().max():.0e}")
    record(family, "gradients", f"{max(differences):.0e}")


def train(family: str, folder: str, data: str, output: pathlib.Path, **flags) -> tuple[Policy, str]:
    """Train for three steps. Return the policy as it was before, and the largest mismatch, as a cell of the table."""
    before = load_policy(folder, PolicyFlags(**flags), CPU)
    grpo.main(config(folder, data, output, task="count", max_steps=3, **flags))
    mismatch = max(row["sampling/logp_difference_max"] for row in read_jsonl(output / "metrics.jsonl"))
    assert mismatch < (0.1 if flags.get("load_in_4bit") else 1e-5)
    return before, f"{mismatch:.0e}"


# What other tests train with every setting is trained here only with --slow.
TRAINED_ELSEWHERE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5", "qwen3"}
MODELS = [pytest.param(f, marks=[pytest.mark.slow] * (f in TRAINED_ELSEWHERE)) for f in models.FAMILIES]


@pytest.mark.parametrize("family", MODELS)
def test_family_trains_whole(family, tiny_family, rows, tmp_path, capsys):
    """What is frozen does not move, the rest does; transformers loads the export, and evaluate.py samples from it."""
    folder, final = tiny_family(family), tmp_path / "run" / "final"
    before, mismatch = train(family, folder, rows(family), tmp_path / "run")
    frozen = [*vision_parts(before.model), *({find_family(before.model.config).router} - {""})]
    assert f"frozen: {', '.join(frozen) or 'nothing'}\n" in capsys.readouterr().err
    after = auto_class(load_config(folder)).from_pretrained(final, dtype=torch.float32)
    moved = []
    for name, new in after.named_parameters():
        old = before.model.get_parameter(name)
        assert old.requires_grad != any(f".{part}." in name for part in frozen), name
        assert old.requires_grad or torch.equal(old, new), f"{name} is frozen but moved"
        moved.append(not torch.equal(old, new))
    assert sum(moved) > 15
    evaluate.main(
        evaluate.Config(
            model=str(final), data=rows(family), task="count", max_completion_length=4, output=str(tmp_path / "eval")
        )
    )
    record(family, "full", "yes")
    record(family, "sampler", mismatch)


@pytest.mark.parametrize("four_bit", [*slow(False), True])
@pytest.mark.parametrize("family", MODELS)
def test_family_trains_an_adapter(family, four_bit, tiny_family, rows, tmp_path):
    """The adapter reaches every linear layer of the decoder but the router; the base stays; PEFT loads the adapter."""
    folder, final = tiny_family(family), tmp_path / "run" / "final"
    dtype = {"load_in_4bit": True, "dtype": "bfloat16"} if four_bit else {}
    before, _ = train(family, folder, rows(family), tmp_path / "run", lora_rank=4, **dtype)
    layers = language_model(before.model).layers
    linear = {name for name, m in layers.named_modules() if isinstance(m, torch.nn.Linear) and "lora_" not in name}
    adapted = {f"{name}.base_layer" for name in adapted_layers(layers)}
    assert linear - adapted == {name for name in linear if name.endswith(".router")}
    base = auto_class(load_config(folder)).from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, final)
    factors = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(factors) == len(adapted)
    assert all(factor.abs().max() > 0 for factor in factors)
    record(family, "4-bit" if four_bit else "lora", "yes")


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "aria"])
def test_family_adapts_its_routed_experts_by_a_flag(family, tiny_family, rows, tmp_path, capsys):
    """The sampler's weights, PEFT, merge_lora.py and a continued run give the adapted experts of the trainer."""
    folder, final, merged = tiny_family(family), tmp_path / "run" / "final", tmp_path / "merged"
    before, _ = train(family, folder, rows(family), tmp_path / "run", lora_rank=4, lora_experts=True)
    layers = language_model(before.model).layers
    experts = {name.replace(".base_layer", "") for name, weight in layers.named_parameters() if weight.ndim == 3}
    assert len(experts) == 2 * len(layers)
    assert experts < adapted_layers(layers).keys()
    trained = capsys.readouterr().err.partition("trained: adapter of ")[2].partition(";")[0].split(", ")
    assert {name.partition(".")[2] for name in experts} < set(trained)

    base = auto_class(load_config(folder)).from_pretrained(folder, dtype=torch.float32)
    peft_model = peft.PeftModel.from_pretrained(copy.deepcopy(base), final).merge_and_unload()
    merge_lora.merge_lora(folder, str(final), str(merged))
    merged_model = auto_class(load_config(str(merged))).from_pretrained(merged, dtype=torch.float32)
    continued = load_policy(folder, PolicyFlags(adapter=str(final)), CPU)
    weights = dict(adapted_weights(continued.model))
    for name, weight in peft_model.named_parameters():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(merged_model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)
    moved = [not torch.equal(weight, base.get_parameter(name)) for name, weight in weights.items() if weight.ndim == 3]
    assert moved and all(moved)
    flags = dict(task="count", max_steps=1, adapter=str(final), beta=0.01)
    grpo.main(config(folder, rows(family), tmp_path / "continued", **flags))
    row = read_jsonl(tmp_path / "continued" / "metrics.jsonl")[0]
    assert row["kl"] == pytest.approx(0, abs=1e-6), "the reference starts with the same adapter"
    with pytest.raises(UserError, match="leave out --lora_dropout"):
        load_policy(folder, PolicyFlags(adapter=str(final), lora_dropout=0.1), CPU)


def test_adapted_experts_are_refused_where_there_are_none(tiny_family):
    with pytest.raises(UserError, match="the model has no routed experts"):
        load_policy(tiny_family("qwen3"), PolicyFlags(lora_rank=4, lora_experts=True), CPU)
    for flags in ({"lora_rank": 4, "lora_dropout": 0.1}, {}):
        with pytest.raises(ValueError, match="lora_experts applies to a new adapter without dropout"):
            PolicyFlags(lora_experts=True, **flags).check_policy()


# Parts of the tiny towers on which no completion depends: Aria takes the last layer's output before the norm, and the
# second deepstack features are added to image tokens after the last of two decoder layers.
UNUSED = {"aria": "vision_tower.post_layernorm", "qwen3_vl_moe": "deepstack_merger_list.1"}


@pytest.mark.parametrize("family", [family for family in WITH_IMAGES if family not in TRAINED_ELSEWHERE])
def test_family_trains_tower_and_router_when_asked(family, tiny_family, rows, tmp_path):
    folder = tiny_family(family)
    before, _ = train(family, folder, rows(family), tmp_path / "run", train_vision=True, train_router=True)
    after = auto_class(load_config(folder)).from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    parts = vision_parts(after) | routers(after)
    old = {
        name: dict(part.named_parameters())
        for name, part in (vision_parts(before.model) | routers(before.model)).items()
    }
    same = {
        f"{part}.{name}"
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
        if torch.equal(parameter, old[part][name])
    }
    assert all(UNUSED.get(family, "-") in name for name in same), same


@pytest.mark.slow
def test_family_with_linear_attention_is_resumed_exactly_and_samples_from_its_own_weights(tiny_family, rows, tmp_path):
    """Qwen3.5: checkpointed layers, a resumed run, and `--engine policy` all give the same run."""
    folder, data = tiny_family("qwen3_5"), rows("qwen3_5")
    flags = dict(task="count", max_steps=3, save_every=2, beta=0.01)
    grpo.main(config(folder, data, tmp_path / "run", **flags))
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    grpo.main(config(folder, data, tmp_path / "resumed", resume="newest", **flags))
    whole, resumed = (weights(tmp_path / name / "final") for name in ("run", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = dict(engine="policy", activation_checkpointing="full", micro_batch_tokens=200)
    grpo.main(config(folder, data, tmp_path / "policy", **flags, **other))
    for a, b in zip(*(read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("run", "policy"))):
        for name in ("reward", "completions/mean_length", "kl", "entropy", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_family_with_linear_attention_trains_the_same_on_two_processes(tiny_family, rows, tmp_path):
    flags = [f"--model={tiny_family('qwen3_5')}", f"--data={rows('qwen3_5')}", "--task=count", "--max_steps=3"]
    flags += [f"--{name}={value}" for name, value in SMALL.items()] + ["--learning_rate=1e-3", "--sharding=full"]
    for processes in (0, 2):
        done = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(*(read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))):
        for name in ("reward", "completions/mean_length", "loss", "entropy", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    one, two = (weights(tmp_path / name / "final") for name in ("0", "2"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-3


def test_a_chat_template_saved_with_the_processor_is_found_and_exported(tiny_family, tmp_path):
    """Checkpoints of older releases, such as Aria's, have chat_template.json and a tokenizer without a template."""
    folder = tmp_path / "aria"
    shutil.copytree(tiny_family("aria"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_processor(str(folder), "count").tokenizer.chat_template == template
    copy_settings(folder, tmp_path / "final")
    assert load_tokenizer(str(tmp_path / "final")).chat_template == template


def test_a_chat_template_that_drops_text_is_refused_or_gets_parts(tiny_family):
    """Some templates ignore text that is not in a list of parts."""
    processor = load_processor(tiny_family("qwen2_5"), "count")
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    processor.tokenizer.chat_template = parts
    ids = encode_prompts([make_sample("How many?", "1", [], "row 1", system="Count.")], processor)[0].ids
    assert processor.tokenizer.decode(ids).startswith("Count.How many?")
    processor = load_processor(tiny_family("qwen2_5"), "count")  # the other one has kept the encoded text
    processor.tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="leaves out a part of a turn or of the system prompt"):
        encode_prompts([make_sample("How many?", "1", [], "row 1", system="Count.")], processor)


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking | default(true) %}<think>{% endif %}"
)


def test_variables_of_the_chat_template_are_set_by_a_flag(tiny_family, tmp_path):
    """Qwen3.5 thinks unless its chat template is told not to. The prompt is told so."""
    folder = tmp_path / "qwen3"
    shutil.copytree(tiny_family("qwen3"), folder)
    (folder / "chat_template.jinja").write_text(THINKING)

    def ends(*settings: str) -> str:
        processor = load_processor(str(folder), "count", chat_template_kwargs=settings)
        prompt = encode_prompts([make_sample("How many?", "1", [], "row 1")], processor)[0]
        return processor.tokenizer.decode(prompt.ids)[-len("<think>") :]

    assert ends() == ends("enable_thinking=true") == "<think>"
    assert ends("enable_thinking=false") != "<think>"
    for setting, problem in (("enable_thinking", "must be NAME=VALUE"), ("think=false", "has no variable think")):
        with pytest.raises(UserError, match=problem):
            load_processor(str(folder), "count", chat_template_kwargs=[setting])


@needs("parts/families")
def test_an_unknown_family_is_refused_by_name(tiny_family, tmp_path):
    folder = tmp_path / "llava"
    transformers.LlavaConfig().save_pretrained(folder)
    for load in (load_config, lambda name: load_processor(name, "count")):
        with pytest.raises(UserError, match="is a llava model, which is not supported: use one of Qwen") as error:
            load(str(folder))
        assert all(title in str(error.value) for title in ("Qwen3-VL", "Aria", "Llama"))
        assert "\n" not in str(error.value)


@needs("parts/families")
def test_the_table_of_families_in_the_docs_is_what_was_measured():
    """With RECORD_FAMILIES, write the table instead."""
    table = json.loads((ROOT / "docs/results/families.json").read_text())
    lines = ["| family | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in models.FAMILIES.items():
        title = find_family(row.config(models.TEXT, models.TOKENS)).title
        lines.append(f"| {title} | " + " | ".join(table.get(name, {}).get(column, "–") for column in COLUMNS) + " |")
    path = ROOT / "docs" / "models.md"
    text = re.sub(r"\| family \| packed.*?\n\n", lambda _: "\n".join(lines) + "\n\n", path.read_text(), flags=re.DOTALL)
    if RECORD:
        path.write_text(text)
    assert path.read_text() == text, "the docs lack a family, or a result: run this file as its first lines say"
