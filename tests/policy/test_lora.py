"""LoRA adapters: new and continued adapters, the reference, weight sync, 4-bit bases and moments in host memory.

Guards against: gradients that differ from those of a plain forward pass, a reference other than the adapter that the
run started from, weights that drift through repeated merging, and saved adapters that PEFT cannot load.
"""

import copy
import json
import math
import pathlib
import re
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import grpo
from common import distributed
from common.errors import UserError
from common.files import read_jsonl
from common.records import Completion, Group
from config import PolicyFlags
from data import load_processor
from packing import pack
from policy import lora, optimizer
from policy.batches import completion_logprobs
from policy.forward import enable_packed_forward, token_logprobs
from policy.lora import adapted_weights, continue_adapter, has_dropout, new_adapter, read_adapter, reference_weights
from policy.model import cache_image_features, check_trained, load_model, load_policy, vision_parameters
from policy.optimizer import pinned_slots
from policy.sharding import apply_fsdp
from sampling.hf_engine import HFEngine
from tests.helpers.adapters import LANGUAGE_TARGETS, VISION_TARGETS, copy_adapter, plain_logits, save_random_adapter
from tests.helpers.marks import slow
from tests.helpers.models import FAMILIES, WITH_IMAGES, build, make_group, plain_logprobs, save_tiny
from tests.helpers.runs import SMALL, config, weights
from tests.helpers.scripts import run_script

CPU = torch.device("cpu")


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every LoRA B matrix with random values, as if the adapter had been trained. In a new adapter, B is zero."""
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B.policy" in name:
            values = 0.1 * torch.randn(parameter.shape, generator=g)
            distributed.full_tensor(parameter.data).copy_(values)  # works in place, because there is only one process


def peft_logits(base: str, adapter: pathlib.Path, prompt) -> torch.Tensor:
    model = peft.PeftModel.from_pretrained(load_model(base, torch.float32), adapter).eval()
    return plain_logits(model, prompt)


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vision", [False, True])
def test_gradients_equal_the_plain_forward(family, vision):
    base = build(family)
    g = torch.Generator().manual_seed(1)
    grids = [(4, 4)] if family in WITH_IMAGES else []
    groups = [make_group(base, family, 5, grids, [4, 1, 7], g), make_group(base, family, 3, [], [2, 2], g)]
    new_adapter(base, rank=4, alpha=8, vision=vision)
    randomise(base)
    packed = copy.deepcopy(base)
    enable_packed_forward(packed)
    batch = pack(groups)
    weight = torch.randn(len(batch.targets), generator=g)
    want = torch.cat([plain_logprobs(base, group, r.ids) for group in groups for r in group.completions])
    got, _ = token_logprobs(packed, batch)
    bounds = FAMILIES[family].bounds
    torch.testing.assert_close(got, want, atol=bounds[0], rtol=0)
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    trained = 0
    for (name, p), q in zip(base.named_parameters(), packed.parameters(), strict=True):
        assert (p.grad is not None) == (q.grad is not None) == (".lora_" in name and p.requires_grad), name
        if p.grad is not None and p.grad.abs().max() > 0:
            trained += 1
            torch.testing.assert_close(q.grad, p.grad, atol=bounds[1] * max(1.0, p.grad.abs().max().item()), rtol=0)
    assert trained >= 8
    assert any(p.requires_grad for p in vision_parameters(base)) == (vision and family in WITH_IMAGES)


def test_a_continued_adapter_names_the_base_that_it_was_made_for(tiny_model, sft, tmp_path, capsys):
    continue_adapter(load_model(tiny_model, torch.float32), copy_adapter(sft, tmp_path / "same", {}))
    assert capsys.readouterr().err == ""
    other = copy_adapter(sft, tmp_path / "other", {"base_model_name_or_path": "maker/Other-7B"})
    continue_adapter(load_model(tiny_model, torch.float32), other)
    named = f"the adapter in {other} names maker/Other-7B as its base; here, it is {tiny_model}\n"
    assert capsys.readouterr().err == named


def test_a_continued_adapter_starts_with_the_same_logits(tiny_model, sft, prompt):
    policy = load_policy(tiny_model, PolicyFlags(adapter=str(sft)), CPU)
    want = peft_logits(tiny_model, sft, prompt)
    fresh = load_model(tiny_model, torch.float32)
    base = plain_logits(fresh, prompt)
    assert (want - base).abs().max() > 0.01, "the adapter has no effect"
    continue_adapter(fresh, str(sft))
    assert torch.equal(plain_logits(fresh, prompt), want)
    weights_with_adapter = dict(adapted_weights(policy.model))
    for name, parameter in fresh.named_parameters():
        if ".lora_" in name:
            continue
        parameter.data = weights_with_adapter[name.replace(".base_layer.", ".")]
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    torch.testing.assert_close(plain_logits(fresh, prompt), want, atol=1e-5, rtol=0)


def test_the_reference_is_where_the_adapter_started(tiny_model, sft, prompt):
    model = load_model(tiny_model, torch.float32)
    base = plain_logits(model, prompt)
    continue_adapter(model, str(sft))
    start = plain_logits(model, prompt)
    randomise(model, seed=5)
    trained = plain_logits(model, prompt)
    with reference_weights(model):
        assert torch.equal(plain_logits(model, prompt), start)
    assert torch.equal(plain_logits(model, prompt), trained)
    assert not torch.equal(trained, start)

    model = load_model(tiny_model, torch.float32)
    new_adapter(model, 4, 8, vision=False)
    randomise(model)
    with reference_weights(model):
        assert torch.equal(plain_logits(model, prompt), base)
    assert not torch.equal(plain_logits(model, prompt), base)
    assert [name for name, p in model.named_parameters() if p.requires_grad and ".policy." not in name] == []


def test_a_new_adapter_is_the_same_wherever_it_is_made():
    """On every process and at every start, whatever was drawn before. It leaves the random state as it was."""
    adapters = []
    for seed in (5, 6):
        model = build("qwen2_5")
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        new_adapter(model, rank=4, alpha=8, vision=False)
        assert torch.equal(torch.get_rng_state(), state)
        adapters.append(lora.adapter_parameters(model))
    assert any(parameter.any() for parameter in adapters[0].values())
    assert all(torch.equal(parameter, adapters[1][name]) for name, parameter in adapters[0].items())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("four_bit", [False, True])
def test_after_fifty_syncs_the_sampler_holds_base_plus_adapter(tiny_model, four_bit, sharded):
    """The fiftieth sync is as exact as the first, because nothing is ever merged into the base."""
    policy = load_policy(
        tiny_model, PolicyFlags(lora_rank=4, lora_alpha=8, load_in_4bit=four_bit, dtype="bfloat16"), CPU
    )
    if sharded:
        distributed.start()
        policy = apply_fsdp(policy, CPU, torch.bfloat16)
    engine = HFEngine(load_model(tiny_model, torch.bfloat16), load_processor(tiny_model, "count").tokenizer)
    before = {name: p.clone() for name, p in policy.model.named_parameters() if ".lora_" not in name}
    for seed in range(50):
        randomise(policy.model, seed)
        engine.sync_weights(policy)
    layers = lora.adapted_layers(policy.model)
    synced, num_adapted = dict(engine.model.named_parameters()), 0
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            continue
        parameter = distributed.full_tensor(parameter)
        assert torch.equal(parameter, distributed.full_tensor(before[name])), name
        module, _, leaf = name.replace(".base_layer.", ".").rpartition(".")
        want = lora.dequantised(parameter) if hasattr(parameter, "quant_state") else parameter
        if module in layers and leaf == "weight":
            num_adapted += 1
            a, b = (
                distributed.full_tensor(factor["policy"].weight)
                for factor in (layers[module].lora_A, layers[module].lora_B)
            )
            want = (want.float() + 2 * b @ a).bfloat16()  # α is twice the rank
        got = synced[f"{module}.{leaf}"]
        assert torch.allclose(got, want, rtol=2**-7, atol=0), name  # one of the two nearest numbers
        assert module in layers or torch.equal(got, want), name
    assert num_adapted == 28


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_far_below_the_rounding_step_reach_the_sampler_in_the_mean(tiny_model, dtype):
    """To the nearest number, 1 % of a step would always be rounded away."""
    policy = load_policy(
        tiny_model, PolicyFlags(lora_rank=4, lora_alpha=8, dtype=str(dtype).removeprefix("torch.")), CPU
    )
    step = torch.finfo(dtype).eps * 0.02  # of a typical weight
    for layer in lora.adapted_layers(policy.model).values():
        layer.lora_A["policy"].weight.data = torch.full_like(layer.lora_A["policy"].weight, 0.1)
        layer.lora_B["policy"].weight.data = torch.full_like(layer.lora_B["policy"].weight, 0.01 * step / 0.8)
    base = dict(load_model(tiny_model, dtype).named_parameters())
    sent, again = dict(adapted_weights(policy.model)), dict(adapted_weights(policy.model))
    assert all(torch.equal(sent[name], again[name]) for name in sent), "a sync must not depend on earlier ones"
    changes = [(sent[name].float() - base[name].float()).flatten() for name in sent]
    moved = torch.cat([change for change in changes if change.any()])
    want = 0.01 * step  # scaling 2, rank 4: 2 * 4 * 0.1 * B
    assert moved.numel() > 50_000
    assert moved.mean().item() == pytest.approx(want, rel=0.15)
    assert 0.001 < (moved != 0).float().mean() < 0.1


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_acts_in_training_passes_only(tiny_model, prompt):
    """The reference, the old log-probabilities and the weights for the sampler have no dropout."""
    policies = [load_policy(tiny_model, PolicyFlags(lora_rank=4, lora_dropout=p), CPU) for p in (0.0, 0.5)]
    for policy in policies:
        randomise(policy.model)
    plain, dropping = policies
    groups = [Group(prompt, [Completion(torch.arange(70, 78), torch.zeros(8), 1.0, 1.0)])]
    first, second = (dropping(pack(groups))[0] for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-3), "each training pass must draw its own mask"
    (want,), (got,) = (completion_logprobs(policy, groups, 1.0, 1024) for policy in policies)
    assert torch.equal(got, want)
    with reference_weights(dropping.model), reference_weights(plain.model):
        (want,), (got,) = (completion_logprobs(policy, groups, 1.0, 1024) for policy in policies)
    assert torch.equal(got, want)
    assert dropping.training, "the next training pass must have dropout again"
    sampled = dict(adapted_weights(dropping.model))
    assert all(torch.equal(tensor, sampled[name]) for name, tensor in adapted_weights(plain.model))


def test_image_features_of_a_frozen_tower_have_no_dropout(tiny_model, prompt, tmp_path):
    targets = f"{LANGUAGE_TARGETS}|{VISION_TARGETS}"
    save_random_adapter(tiny_model, tmp_path / "both", target_modules=targets, lora_dropout=0.5)
    policy = load_policy(tiny_model, PolicyFlags(adapter=str(tmp_path / "both")), CPU)
    features = []
    for _ in range(2):
        cache_image_features(policy, [prompt], {})
        features.append(prompt.features)
    assert torch.equal(*features)


def test_a_run_with_dropout_is_resumed_exactly(tiny_model, shapes, tmp_path):
    """The ratio is 1 in a step's only update, sampler and trainer agree, and the saved adapter has the setting."""
    flags = dict(lora_rank=4, lora_dropout=0.5, max_steps=3, save_every=2)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags))
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    grpo.main(config(tiny_model, shapes, tmp_path / "resumed", resume="newest", **flags))
    one, two = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("run", "resumed"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())["lora_dropout"] == 0.5
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert max(row["sampling/logp_difference_mean"] for row in rows) < 1e-5, "it must not count the dropout"
    assert {row["clip_ratio"] for row in rows} == {0.0}
    assert all(row["time/old_logp"] for row in rows), "the updates had no dropout"


def test_a_continued_adapter_keeps_its_dropout_unless_told(tiny_model, sft):
    for given, used in ((None, 0.1), (0.0, 0.0), (0.3, 0.3)):
        policy = load_policy(tiny_model, PolicyFlags(adapter=str(sft), lora_dropout=given), CPU)
        assert policy.model.peft_config["policy"].lora_dropout == used
        assert has_dropout(policy.model) == bool(used)


@pytest.mark.parametrize("flags", [dict(lora_dropout=0.1), dict(lora_rank=4, lora_dropout=1.0)])
def test_dropout_needs_an_adapter_and_a_probability(flags):
    with pytest.raises(ValueError, match=r"lora_dropout must be in \[0, 1\) and needs an adapter"):
        grpo.Config(data="x", **flags)


# --- runs -------------------------------------------------------------------------------------------------------------

RUNS = {
    "new": dict(lora_rank=4, beta=0.01),
    "with vision": dict(lora_rank=4, train_vision=True, beta=0.01),
    "checkpointed": dict(lora_rank=4, activation_checkpointing="full"),
    "4-bit": dict(lora_rank=4, load_in_4bit=True, dtype="bfloat16", beta=0.01),
    "offloaded": dict(offload=("optimizer", "reference"), beta=0.01),
}


@pytest.mark.parametrize("name", ["new", "with vision", "4-bit", *slow("checkpointed", "offloaded")])
def test_runs(name, tiny_model, shapes, tmp_path):
    grpo.main(config(tiny_model, shapes, tmp_path, max_steps=3, save_every=2, **RUNS[name]))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    assert rows[0].get("kl", 0) == pytest.approx(0, abs=1e-7)
    assert max(row["sampling/logp_difference_mean"] for row in rows) < (0.05 if "4" in name else 1e-5)
    if "lora_rank" in RUNS[name]:
        adapter = load_file(tmp_path / "final" / "adapter_model.safetensors")
        assert any(tensor.any() for key, tensor in adapter.items() if "lora_B" in key), "the adapter was not trained"
        assert sorted(p.name for p in (tmp_path / "final").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        size = sum(f.stat().st_size for f in (tmp_path / "checkpoint-2").iterdir())
        assert size < 2_000_000, "the checkpoint contains the frozen model"


def test_moments_in_host_memory_change_nothing(tiny_model, shapes, tmp_path):
    for name, flag in (("device", False), ("host", True)):
        grpo.main(
            config(
                tiny_model,
                shapes,
                tmp_path / name,
                max_steps=3,
                offload=("optimizer",) if flag else (),
                weight_decay=0.1,
            )
        )
    one, two = (weights(tmp_path / name / "final") for name in ("device", "host"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_slots_in_host_memory_are_cut_from_few_chunks(monkeypatch):
    """Each slot lies within one chunk. PyTorch rounds page-locked memory up, so chunk sizes are powers of two."""
    monkeypatch.setattr(optimizer, "PINNED_CHUNK_BYTES", 4 * 4096)
    sizes = [5000, *[271] * 60, 0, 7]
    slots = list(pinned_slots(sizes, pinned=False))
    assert [len(slot) for slot in slots] == sizes
    for i, slot in enumerate(slots):
        slot.fill_(i)
    assert all((slot == i).all() for i, slot in enumerate(slots)), "slots overlap"
    chunks = {slot.untyped_storage().data_ptr(): slot.untyped_storage().nbytes() // 4 for slot in slots if len(slot)}
    assert sorted(chunks.values()) == [2048, 4096, 4096, 4096, 8192], "the last chunk must be as small as possible"


def test_moments_in_host_memory_are_resumed(tiny_model, shapes, tmp_path):
    flags = dict(max_steps=4, save_every=2, offload=("optimizer",), weight_decay=0.1)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", **flags))
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    grpo.main(config(tiny_model, shapes, tmp_path / "resumed", resume="newest", **flags))
    one, two = (weights(tmp_path / name / "final") for name in ("run", "resumed"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_beside_4_bit_weights_two_processes_make_the_run_of_one(tiny_model, shapes, tmp_path):
    flags = [f"--model={tiny_model}", f"--data={shapes}", "--lora_rank=4", "--load_in_4bit", "--dtype=float32"]
    flags += [f"--{key}={value}" for key, value in SMALL.items()]
    flags += ["--learning_rate=1e-3", "--beta=0.01", "--max_steps=2"]
    for processes in (0, 2):
        process = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes)
        assert process.returncode == 0, process.stderr[-2000:]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    for name in ("reward", "grad_norm", "entropy", "kl"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-4), name
    one, two = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("0", "2"))
    assert one.keys() == two.keys() and any(two[name].any() for name in two if "lora_B" in name)


def test_an_sft_adapter_is_continued_and_peft_loads_the_result(tiny_model, sft, shapes, prompt, tmp_path):
    """A run on one process, a run on two processes and a resumed run all give the same adapter. This adapter belongs to
    the same base as the original adapter."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--adapter={sft}", "--lora_dropout=0"]
    flags += ["--max_steps=4", "--save_every=2"]
    flags += [f"--{key}={value}" for key, value in SMALL.items()] + ["--learning_rate=1e-3", "--beta=0.01"]
    for processes in (0, 2):
        process = run_script("grpo.py", *flags, f"--output={tmp_path}/{processes}", processes=processes)
        assert process.returncode == 0, process.stderr[-2000:]
    one, two = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("0", "2"))
    assert one.keys() == load_file(sft / "adapter_model.safetensors").keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    rows = read_jsonl(tmp_path / "0" / "metrics.jsonl")
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0

    shutil.rmtree(tmp_path / "0" / "checkpoint-4")
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "0", resumed)
    flags = dict(adapter=str(sft), lora_dropout=0.0, max_steps=4, beta=0.01)
    grpo.main(config(tiny_model, shapes, resumed, resume="newest", **flags))
    resumed_adapter = load_file(resumed / "final" / "adapter_model.safetensors")
    assert all(torch.allclose(one[name], resumed_adapter[name], atol=1e-6) for name in one)

    settings = json.loads((tmp_path / "0" / "final" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == tiny_model
    targets = {name.rpartition(".")[2] for name in settings["target_modules"]}
    assert targets == {"down_proj", "q_proj", "v_proj"}
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 16, True)
    trained = load_model(tiny_model, torch.float32)
    continue_adapter(trained, str(tmp_path / "0" / "final"))
    assert torch.equal(peft_logits(tiny_model, tmp_path / "0" / "final", prompt), plain_logits(trained, prompt))
    assert not torch.equal(plain_logits(trained, prompt), peft_logits(tiny_model, sft, prompt))


@pytest.mark.parametrize("four_bit", [False, True])
def test_an_adapter_in_a_frozen_tower_is_exported_unchanged(tiny_model, shapes, tmp_path, four_bit):
    save_random_adapter(tiny_model, tmp_path / "both", target_modules=f"{LANGUAGE_TARGETS}|{VISION_TARGETS}")
    adapter = str(tmp_path / "both")
    flags = dict(dtype="bfloat16", beta=0.01, load_in_4bit=four_bit)
    grpo.main(config(tiny_model, shapes, tmp_path / "run", max_steps=2, adapter=adapter, **flags))
    folders = (pathlib.Path(adapter), tmp_path / "run" / "final")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == ("visual" in name), name
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["kl"] == 0


# --- adapters of other tools, and errors ------------------------------------------------------------------------------


def test_names_of_older_releases_are_understood(tiny_model, sft, prompt, tmp_path):
    older = copy_adapter(
        sft, tmp_path / "old", {}, lambda k, t: (k.replace("model.language_model.layers", "model.layers"), t)
    )
    model = load_model(tiny_model, torch.float32)
    continue_adapter(model, older)
    assert torch.equal(plain_logits(model, prompt), peft_logits(tiny_model, sft, prompt))


def test_ranks_and_alphas_under_older_names_are_understood(tiny_model, prompt, tmp_path):
    """The regex in the original settings uses older names and would match nothing. The saved settings use the current
    names, so PEFT can load the result."""
    ranks = {"model.language_model.layers.1.self_attn.q_proj": 2, "v_proj": 3}
    alphas = {"model.language_model.layers.0.self_attn.q_proj": 32, "layers.1.self_attn.v_proj": 1}
    save_random_adapter(
        tiny_model,
        tmp_path / "new",
        target_modules=r"model.language_model.*(q|v)_proj",
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    want = peft_logits(tiny_model, tmp_path / "new", prompt)

    def older(pattern):
        return {name.replace("model.language_model", "^model"): value for name, value in pattern.items()}

    settings = {
        "rank_pattern": older(ranks),
        "alpha_pattern": older(alphas),
        "target_modules": r"model\.layers.*(q|v)_proj",
    }
    old = copy_adapter(
        tmp_path / "new", tmp_path / "old", settings, lambda k, t: (k.replace("model.language_model.", "model."), t)
    )
    model = load_model(tiny_model, torch.float32)
    continue_adapter(model, old)
    assert torch.equal(plain_logits(model, prompt), want)
    (tmp_path / "saved").mkdir()
    lora.write_adapter(model, tiny_model, tmp_path / "saved")
    assert torch.equal(peft_logits(tiny_model, tmp_path / "saved", prompt), want)
    written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in written["target_modules"]} == {"q_proj", "v_proj"}
    assert written["alpha_pattern"] == {
        "model.language_model.layers.0.self_attn.q_proj": 32,
        "model.language_model.layers.1.self_attn.v_proj": 1,
    }


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "mica"])
def test_the_initialisation_of_a_and_b_does_not_matter_later(tiny_model, prompt, tmp_path, init):
    save_random_adapter(tiny_model, tmp_path / "a", target_modules=LANGUAGE_TARGETS, init_lora_weights=init)
    adapter = str(tmp_path / "a")
    model = load_model(tiny_model, torch.float32)
    continue_adapter(model, adapter)
    assert torch.equal(plain_logits(model, prompt), peft_logits(tiny_model, pathlib.Path(adapter), prompt))


def test_an_adapter_of_the_lm_head_is_left_to_merge_lora(tiny_model, tmp_path):
    """The packed forward pass reads the weight of the lm_head, without an adapter."""
    save_random_adapter(tiny_model, tmp_path / "a", target_modules=r".*(lm_head|q_proj)")
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "base_layer" not in name}, file)
    with pytest.raises(
        UserError, match=r"lm_head\.lora_A\.weight cannot be continued: merge the adapter into its base"
    ):
        continue_adapter(load_model(tiny_model, torch.float32), str(tmp_path / "a"))


def test_an_adapter_of_a_router_is_left_to_merge_lora(tmp_path):
    """The packed forward pass computes routers itself, from their weights alone."""
    base = save_tiny("aria", tmp_path / "aria")
    save_random_adapter(base, tmp_path / "a", target_modules=r".*(router|q_proj)")
    with pytest.raises(UserError, match=r"mlp\.router\.lora_A\.weight cannot be continued: merge the adapter into its"):
        continue_adapter(load_model(base, torch.float32), str(tmp_path / "a"))


def test_half_of_a_layers_adapter_is_not_ignored(tiny_model, sft, tmp_path):
    folder = copy_adapter(sft, tmp_path / "adapter", {})
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.language_model.layers.0.self_attn.v_proj.lora_B.weight"
    save_file(tensors | {name.replace("v_proj", "o_proj"): tensors[name].clone()}, file)
    with pytest.raises(UserError, match=r"does not fit its own adapter_config.json: it holds .*o_proj.lora_B"):
        continue_adapter(load_model(tiny_model, torch.float32), folder)


def test_a_convolution_is_left_to_merge_lora(tiny_model, tmp_path):
    save_random_adapter(tiny_model, tmp_path / "a", target_modules=["q_proj", "patch_embed.proj"])
    adapter = str(tmp_path / "a")
    with pytest.raises(UserError, match=r"patch_embed.proj.lora_A.weight cannot be continued: merge"):
        continue_adapter(load_model(tiny_model, torch.float32), adapter)


@pytest.mark.parametrize(
    ("settings", "rename", "message"),
    [
        (
            {"init_lora_weights": "pissa_niter_4"},
            None,
            r"has init_lora_weights='pissa_niter_4', which is not supported: correct it, or merge",
        ),
        ({"init_lora_weights": "olora"}, None, r"has init_lora_weights='olora', which is not supported"),
        ({"use_dora": True}, None, r"does not fit its own adapter_config.json: it lacks .*lora_magnitude_vector"),
        ({"alpha_pattern": {"(": 3}}, None, r"adapter_config.json has a wrong value \(missing \)"),
        ({"modules_to_save": ["lm_head"]}, None, r"made for another base: 'lm_head.weight'"),
        (
            {},
            lambda k, t: (k, t[:, :-1].contiguous() if "lora_A" in k else t),
            r"made for another base: .*mismatch for .*_proj.lora_A.*\[4, 255\].*\[4, 256\]",
        ),
        (
            {},
            lambda k, t: (k.replace("layers.0.self_attn.v_proj.lora_B", "layers.0.self_attn.o_proj.lora_B"), t),
            r"does not fit its own adapter_config.json: it lacks .*layers.0.self_attn.v_proj.lora_B",
        ),
        (
            {},
            lambda k, t: (k.replace("layers.0", "layers.9"), t),
            r"made for another base: this base has no module .*9",
        ),
    ],
)
def test_adapters_that_cannot_be_continued_say_why(tiny_model, sft, tmp_path, settings, rename, message):
    folder = copy_adapter(sft, tmp_path / "adapter", settings, *([rename] if rename else []))
    with pytest.raises(UserError, match=message):
        continue_adapter(load_model(tiny_model, torch.float32), folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "a new one"),
        ("init_lora_weights", None),
        ("bias", "some"),
        ("bias", None),
        ("lora_alpha", None),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_dropout", math.nan),
        ("alpha_pattern", {"q_proj": math.nan}),
        ("alpha_pattern", ["q_proj"]),
        ("use_rslora", "false"),
        ("modules_to_save", "lm_head"),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 1]]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("peft_type", "IA3"),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("a_setting_of_another_release", True),
        ("a_setting_of_another_release", {"rank": 3}),
        ("a_setting_of_another_release", "on"),
    ],
)
def test_settings_that_are_not_followed_are_refused_by_their_name(sft, tmp_path, name, value):
    folder = copy_adapter(sft, tmp_path / "adapter", {name: value})
    with pytest.raises(UserError) as error:
        read_adapter(folder)
    assert re.search(
        rf"adapter_config.json has {name}=.*, which is not supported: correct it, or merge", str(error.value)
    )
    assert "\n" not in str(error.value)


def test_settings_that_change_nothing_are_accepted(tiny_model, sft, prompt, tmp_path):
    settings = {"a_setting_of_another_release": False, "another": None, "group_size": 16, "more": {}, "list": []}
    settings |= {"loftq_config": {"loftq_bits": 4}, "revision": "main", "lora_alpha": 16.0, "lora_dtype": "AUTO"}
    settings |= {"megatron_core": "megatron.core", "layers_to_transform": [0], "layers_pattern": "layers"}
    settings |= {"auto_mapping": {"base_model_class": "X"}, "target_modules": ["nothing"], "alpha_pattern": None}
    model = load_model(tiny_model, torch.float32)
    continue_adapter(model, copy_adapter(sft, tmp_path / "a", settings | {"alpha_pattern": {}}))
    assert torch.equal(plain_logits(model, prompt), peft_logits(tiny_model, sft, prompt))


def test_an_adapter_without_settings_is_refused(sft, tmp_path):
    for number, text in enumerate(("[]", "{", "3", "{}", '"x"')):
        folder = pathlib.Path(copy_adapter(sft, tmp_path / str(number), {}))
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match=r"cannot read an adapter from|has peft_type=None, which is not supported"):
            read_adapter(str(folder))


OLDER = {  # family -> the names of its modules before transformers 4.52, or in a release of the decoder alone
    "internvl": ("model.language_model.", "language_model.model.", "model.vision_tower.", "vision_tower."),
    "aria": ("model.language_model.", "language_model.model.", "model.vision_tower.", "vision_tower."),
    "qwen2_vl": ("model.language_model.", "model.", "model.visual.", "visual."),
    "qwen2_5_vl": ("model.language_model.", "model.", "model.visual.", "visual."),
    "qwen3_5": ("model.language_model.", "model.", "model.visual.", "model.visual."),
    "qwen2_5": ("model.layers.", "layers.", "", ""),
}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("family", OLDER)
def test_adapters_with_older_names_are_read_as_whole_checkpoints_are(tmp_path, family, in_memory):
    """Every linear layer is adapted, the vision tower's too. In memory, names hold that of the adapter: `default`."""
    base = save_tiny(family, tmp_path / "base")
    settings = {"exclude_modules": r".*(router|lm_head|projector).*", "use_rslora": True}
    adapted = save_random_adapter(base, tmp_path / "new", target_modules="all-linear", **settings)
    new, old, new_vision, old_vision = OLDER[family]

    def older(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        key = key.replace(new_vision, old_vision) if new_vision and new_vision in key else key.replace(new, old)
        return re.sub(r"(lora_[AB])\.", r"\1.default.", key) if in_memory else key, tensor

    folder = copy_adapter(tmp_path / "new", tmp_path / "old", {"target_modules": ["q_proj"]}, older)
    model = load_model(base, torch.float32)
    lora.load_adapter(model, *read_adapter(folder), [lora.POLICY], folder)
    want = {k.replace(".default.", ".policy."): v for k, v in adapted.get_base_model().state_dict().items()}
    got = model.state_dict()
    assert any("lora_B" in name for name in want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert {layer.scaling["policy"] for layer in lora.adapted_layers(model).values()} == {4.0}


@pytest.mark.parametrize("name", ["default", "policy", "sft_2", "weights"])
def test_the_name_of_the_adapter_in_its_keys_does_not_matter(tiny_model, sft, prompt, tmp_path, name):
    def in_memory(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return re.sub(r"(lora_[AB])\.", rf"\1.{name}.", key), tensor

    model = load_model(tiny_model, torch.float32)
    continue_adapter(model, copy_adapter(sft, tmp_path / "a", {}, in_memory))
    assert torch.equal(plain_logits(model, prompt), peft_logits(tiny_model, sft, prompt))


def test_a_file_with_two_adapters_is_refused(tiny_model, sft, tmp_path):
    folder = copy_adapter(sft, tmp_path / "two", {})
    file = tmp_path / "two" / "adapter_model.safetensors"
    tensors = load_file(file)
    other = {key.replace("lora_A.", "lora_A.other."): tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors | other, file)
    with pytest.raises(UserError, match="holds several adapters: save the one to use alone"):
        continue_adapter(load_model(tiny_model, torch.float32), folder)


def add_tokens(folder: pathlib.Path, base: str, *tokens: str, special: bool = False, **more: str) -> None:
    """Save the tokenizer of `base` with these tokens added in `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    tokenizer.add_special_tokens(more)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (["<point>"], {}),
        (["<point>", "</point>"], {}),
        (["<point>"], {"special": True}),
        ([], {"pad_token": "[PAD]"}),
        (["Röntgen"], {}),
    ],
)
def test_tokens_that_the_base_lacks_are_not_lost(tiny_model, sft, prompt, tmp_path, tokens, settings):
    """They are refused, and with a base that has them, the adapter is continued."""
    folder = pathlib.Path(copy_adapter(sft, tmp_path / "adapter", {}))
    add_tokens(folder, tiny_model, *tokens, **settings)
    first = (tokens or ["[PAD]"])[0]
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    with pytest.raises(
        UserError,
        match=rf"its tokenizer has {re.escape(repr(first))} as token .* at least {size} tokens, or remove those",
    ):
        continue_adapter(load_model(tiny_model, torch.float32), str(folder))
    base = shutil.copytree(tiny_model, tmp_path / "base")
    add_tokens(base, tiny_model, *tokens, **settings)
    model = load_model(str(base), torch.float32)
    continue_adapter(model, str(folder))
    assert torch.equal(plain_logits(model, prompt), peft_logits(tiny_model, sft, prompt))


def test_the_tokenizer_of_an_adapter_that_adds_nothing_is_ignored(tiny_model, sft, tmp_path):
    folder = pathlib.Path(copy_adapter(sft, tmp_path / "adapter", {}))
    add_tokens(folder, tiny_model)
    (folder / "chat_template.jinja").write_text("another")
    continue_adapter(load_model(tiny_model, torch.float32), str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot compare the tokenizers of .*/adapter and .*model: "):
        continue_adapter(load_model(tiny_model, torch.float32), str(folder))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_damaged_weights_are_named(tiny_model, sft, tmp_path, name):
    shutil.copytree(sft, tmp_path / "a")
    whole = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    for content in (whole[:1000], whole[:-10], b"\x80nonsense", b""):
        (tmp_path / "a" / name).write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read an adapter from .*/a' \(.+\)"):
            continue_adapter(load_model(tiny_model, torch.float32), str(tmp_path / "a"))


def test_a_folder_without_an_adapter_is_named(tiny_model, tmp_path):
    with pytest.raises(UserError, match=r"has no adapter_config.json: give one, such as a run's final/$"):
        continue_adapter(load_model(tiny_model, torch.float32), str(tmp_path))
    with pytest.raises(ValueError, match="leave lora_rank and lora_alpha out"):
        grpo.Config(data="x", adapter="y", lora_rank=4)
    with pytest.raises(ValueError, match="load_in_4bit freezes the model: give lora_rank or adapter"):
        grpo.Config(data="x", load_in_4bit=True)
    with pytest.raises(ValueError, match="lora_alpha applies to a new adapter: give lora_rank"):
        grpo.Config(data="x", lora_alpha=4.0)
    for adapter in (dict(lora_rank=4), dict(adapter="y")):
        with pytest.raises(ValueError, match="offload: an adapter needs no reference model"):
            grpo.Config(data="x", offload=("reference",), **adapter)


def test_an_adapter_with_nothing_to_train_is_reported(tiny_model, sft, shapes, tmp_path, capsys):
    save_random_adapter(tiny_model, tmp_path / "vision", target_modules=VISION_TARGETS)
    vision_adapter = str(tmp_path / "vision")
    with pytest.raises(UserError, match=r"adapts only the vision tower, which is frozen: add --train_vision"):
        grpo.main(config(tiny_model, shapes, tmp_path / "a", max_steps=1, adapter=vision_adapter))
    assert not (tmp_path / "a").exists()
    warning = "--train_vision has no effect: the adapter does not adapt a vision tower\n"
    for adapter, expected in ((vision_adapter, ""), (str(sft), warning)):
        policy = load_policy(tiny_model, PolicyFlags(adapter=adapter, train_vision=True), CPU)
        check_trained(policy, PolicyFlags(adapter=adapter, train_vision=True))
        printed = capsys.readouterr().err
        assert printed.startswith("trained: adapter of ") and printed.endswith(f"; frozen: everything else\n{expected}")
    with pytest.raises(UserError, match=r"^--vision_rate 0.001: the adapter does not adapt a vision tower"):
        check_trained(policy, PolicyFlags(adapter=str(sft), train_vision=True, vision_rate=1e-3))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "aria"])
def test_only_the_decoders_linear_layers_are_in_4_bits(family, tmp_path):
    """The sampler uses the tower's features, and the packed forward pass reads lm_head and routers as they are."""
    base = save_tiny(family, tmp_path)
    model = load_policy(base, PolicyFlags(lora_rank=4, load_in_4bit=True, dtype="bfloat16"), CPU).model
    quantised = {name.replace(".base_layer", "") for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    linear = {name for name, module in build(family).named_modules() if isinstance(module, torch.nn.Linear)}
    decoder = {name for name in linear if ".layers." in name and "vision" not in name and "router" not in name}
    assert quantised == {f"{name}.weight" for name in decoder}


def test_a_base_saved_in_4_bits_is_named(tiny_model, tmp_path):
    policy = load_policy(tiny_model, PolicyFlags(lora_rank=4, load_in_4bit=True, dtype="bfloat16"), CPU)
    folder = shutil.copytree(tiny_model, tmp_path / "quantised")
    policy.model.config.save_pretrained(folder)
    with pytest.raises(UserError, match=r"quantised' was saved quantised: give the original model"):
        load_policy(str(folder), PolicyFlags(lora_rank=4), CPU)
