"""Compare models merged by `merge_lora.py` with PEFT's own forward pass, for every supported kind of adapter."""

import json
import pathlib
import re
import shutil

import peft
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from common.errors import RunStopped, UserError
from merge_lora import merge_lora
from policy.lora import adapted_layers
from policy.model import load_model
from tests.helpers.adapters import LANGUAGE_TARGETS, copy_adapter, plain_logits, save_random_adapter
from tests.helpers.marks import slow
from tests.helpers.models import save_tiny
from tests.helpers.scripts import run_script

KINDS = {
    "lora": dict(target_modules=LANGUAGE_TARGETS),
    "rslora": dict(target_modules=LANGUAGE_TARGETS, use_rslora=True),
    "dora": dict(target_modules=LANGUAGE_TARGETS, use_dora=True),
    "every linear layer, vision tower included": dict(target_modules="all-linear"),
    "different ranks and alphas": dict(
        target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 1}
    ),
    "embedding": dict(target_modules=["embed_tokens", "q_proj"]),
    "embedding and lm_head as one": dict(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    "trained biases": dict(target_modules=["q_proj", "v_proj"], bias="all"),
    "trained biases of adapted layers": dict(target_modules=["q_proj", "v_proj"], bias="lora_only"),
    "patch embedding": dict(target_modules=["patch_embed.proj", "q_proj"]),
    "full lm_head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "full embedding and lm_head": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
}


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory) -> str:
    """Return a sharded model with a separate lm_head, as in the 7B model.

    The tiny model ties its lm_head to its embedding.
    """
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.lm_head.weight is not model.model.language_model.embed_tokens.weight
    torch.nn.init.normal_(model.lm_head.weight, std=0.08)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return str(folder)


@pytest.mark.parametrize("base", [*slow("tiny_model"), "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_adapted(kind, base, prompt, tmp_path, request, capsys):
    base = request.getfixturevalue(base)
    want = plain_logits(save_random_adapter(base, tmp_path / "adapter", **KINDS[kind]), prompt)
    difference = merge_lora(base, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    got = plain_logits(load_model(str(tmp_path / "merged"), torch.float32).eval(), prompt)
    start = plain_logits(load_model(base, torch.float32).eval(), prompt)
    assert (want - start).abs().max() > 0.05, "the adapter has no effect"
    assert difference <= 1e-4 and (got - want).abs().max() <= 1e-4
    printed = capsys.readouterr().out
    assert f"the adapter names {base} as its base; it is merged into {base}" in printed
    assert "largest difference of the logits" in printed
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_text() == (pathlib.Path(base) / name).read_text()
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


def test_the_command_with_files_of_older_releases(tiny_model, sft, prompt, tmp_path):
    """Merge a base and an adapter with the older weight names of the hub's Qwen2.5-VL files.

    The result is saved in a different dtype.
    """
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(tiny_model, base)
    shutil.copytree(sft, adapter)
    old_weights = {}
    for key, tensor in load_file(base / "model.safetensors").items():
        old_weights[key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")] = tensor
    save_file(old_weights, base / "model.safetensors", metadata={"format": "pt"})
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {key.replace("model.language_model.", "model."): tensor for key, tensor in tensors.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    output = tmp_path / "merged"
    flags = [f"--base_model={base}", f"--lora_model={adapter}", f"--output_path={output}", "--dtype=bfloat16"]
    process = run_script("merge_lora.py", *flags)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "largest difference" in process.stdout
    model = load_model(str(output), torch.bfloat16)
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(output / "model.safetensors").keys() == old_weights.keys()
    want = plain_logits(peft.PeftModel.from_pretrained(load_model(tiny_model, torch.float32), sft).eval(), prompt)
    assert (plain_logits(model.float().eval(), prompt) - want).abs().max() < 0.1 * want.std()
    rerun = run_script("merge_lora.py", *flags)
    assert (rerun.returncode, "already exists" in rerun.stderr, "Traceback" in rerun.stderr) == (2, True, False)


@pytest.mark.parametrize(
    "kind", ["dora", "embedding", "full embedding and lm_head", "trained biases", "patch embedding"]
)
def test_adapters_saved_under_the_names_in_memory_are_merged(untied, kind, prompt, tmp_path):
    want = plain_logits(save_random_adapter(untied, tmp_path / "adapter", **KINDS[kind]), prompt)

    def in_memory(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if re.search(r"(embed_tokens|lm_head)\.weight$", key):
            return key.replace(".weight", ".modules_to_save.default.weight"), tensor
        key = re.sub(r"(lora_(?:[AB]|embedding_[AB]|magnitude_vector))", r"\1.default", key)
        return key + ".weight" * key.endswith("magnitude_vector.default"), tensor

    folder = copy_adapter(tmp_path / "adapter", tmp_path / "renamed", {}, in_memory)
    assert any(".default" in key for key in load_file(tmp_path / "renamed" / "adapter_model.safetensors"))
    merge_lora(untied, folder, str(tmp_path / "merged"))
    assert (plain_logits(load_model(str(tmp_path / "merged"), torch.float32).eval(), prompt) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["internvl", "aria"])
@pytest.mark.parametrize("kind", ["language", "lm_head"])
def test_older_names_of_families_are_merged(family, kind, tmp_path):
    """The names before transformers 4.52, of whole checkpoints too."""
    base = save_tiny(family, tmp_path / "base")
    more = {"modules_to_save": ["lm_head"]} if kind == "lm_head" else {}
    save_random_adapter(base, tmp_path / "new", target_modules=r".*language_model.*(q|v)_proj", **more)
    new = merge_lora(base, str(tmp_path / "new"), str(tmp_path / "a"))
    old = copy_adapter(
        tmp_path / "new",
        tmp_path / "old",
        {"modules_to_save": ["language_model.lm_head"]} if more else {},
        lambda k, t: (
            k.replace("model.language_model.", "language_model.model.").replace(
                "model.lm_head", "model.language_model.lm_head"
            ),
            t,
        ),
    )
    assert merge_lora(base, old, str(tmp_path / "b")) == new
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_added_tokens_reach_the_merged_model_with_a_base_that_has_them(tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    config = AutoConfig.from_pretrained(tiny_model)
    rows = config.text_config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([f"<{i}>" for i in range(rows - len(tokenizer))] + ["<point>"])
    resized = load_model(tiny_model, torch.float32)
    resized.resize_token_embeddings(rows + 8)
    resized.save_pretrained(base)
    save_random_adapter(
        str(base), tmp_path / "a", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    tokenizer.save_pretrained(tmp_path / "a")
    for other in (base, tiny_model):
        with pytest.raises(UserError, match=r"its tokenizer has '<.*>' as token .*, unlike .*tokens, or remove"):
            merge_lora(str(other), str(tmp_path / "a"), str(tmp_path / "merged"))
    tokenizer.save_pretrained(base)
    merge_lora(str(base), str(tmp_path / "a"), str(tmp_path / "merged"))
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("<point>").input_ids == [rows]
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    trained = next(tensor for name, tensor in saved.items() if "embed_tokens" in name)
    merged = load_model(str(tmp_path / "merged"), torch.float32).get_input_embeddings().weight
    assert torch.equal(merged, trained)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # an adapter without a tokenizer, but of another size
        (tmp_path / "a" / name).unlink()
    with pytest.raises(UserError, match=r"made for another base: size mismatch for (lm_head|.*embed_tokens)"):
        merge_lora(tiny_model, str(tmp_path / "a"), str(tmp_path / "other"))


def test_alphas_under_older_names_are_merged(tiny_model, prompt, tmp_path):
    name = "model.language_model.layers.0.self_attn.q_proj"
    want = plain_logits(
        save_random_adapter(tiny_model, tmp_path / "new", target_modules=LANGUAGE_TARGETS, alpha_pattern={name: 64}),
        prompt,
    )
    old_alphas = {name.replace("model.language_model", "^model"): 64}
    old = copy_adapter(
        tmp_path / "new",
        tmp_path / "old",
        {"alpha_pattern": old_alphas, "target_modules": r"model\.layers.*proj"},
        lambda k, t: (k.replace("model.language_model.", "model."), t),
    )
    merge_lora(tiny_model, old, str(tmp_path / "merged"))
    assert (plain_logits(load_model(str(tmp_path / "merged"), torch.float32).eval(), prompt) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("left_out", ["", "layers.0", "mlp"])
def test_an_adapter_that_is_not_merged_is_found_out(tiny_model, tmp_path, monkeypatch, dtype, left_out, capsys):
    """An adapter that is not merged, or only in part, is detected even if it changes the logits by less than the
    allowed difference."""
    save_random_adapter(tiny_model, tmp_path / "adapter", target_modules=LANGUAGE_TARGETS)
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 2}))
    merge_lora(tiny_model, str(tmp_path / "adapter"), str(tmp_path / "whole"), dtype=dtype)

    def some_layers(model):
        return {name: layer for name, layer in adapted_layers(model).items() if left_out not in name}

    monkeypatch.setattr("merge_lora.adapted_layers", some_layers)
    with pytest.raises(
        RunStopped, match=r"merged.partial does not reproduce the adapter's logits: the RMS error .* kept"
    ):
        merge_lora(tiny_model, str(tmp_path / "adapter"), str(tmp_path / "merged"), dtype=dtype)


def test_a_merge_in_bfloat16_rounds_once(tiny_model, tmp_path):
    """The merged weights are those of a merge in float32, rounded."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    load_model(tiny_model, torch.bfloat16).save_pretrained(base)
    save_random_adapter(tiny_model, tmp_path / "adapter", target_modules=LANGUAGE_TARGETS)
    merged = []
    for dtype in ("auto", "float32"):
        merge_lora(str(base), str(tmp_path / "adapter"), str(tmp_path / dtype), dtype=dtype)
        merged.append(load_file(tmp_path / dtype / "model.safetensors"))
    rounded, exact = merged
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_generation_settings_that_transformers_refuses_to_save_are_copied(tiny_model, sft, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    merge_lora(str(base), str(sft), str(tmp_path / "merged"))
    copied = tmp_path / "merged" / "generation_config.json"
    assert copied.read_text() == (base / "generation_config.json").read_text()


def test_other_files_beside_the_base_are_left_alone(tiny_model, untied, sft, tmp_path):
    for number, base in enumerate((tiny_model, untied)):
        folder = tmp_path / f"base-{number}"
        shutil.copytree(base, folder)
        save_file({"model.stray": torch.zeros(2), "lm_head.weight": torch.zeros(512, 128)}, folder / "a.safetensors")
        merge_lora(str(folder), str(sft), str(tmp_path / f"merged-{number}"))
        merged = {}
        for file in (tmp_path / f"merged-{number}").glob("*.safetensors"):
            merged |= load_file(file)
        assert "model.stray" not in merged


def test_damaged_bases_and_impossible_outputs_are_named(tiny_model, untied, sft, tmp_path):
    def copy(name: str, base: str = tiny_model) -> pathlib.Path:
        return pathlib.Path(shutil.copytree(base, tmp_path / name))

    def copy_with_config(name: str, **changes) -> None:
        path = copy(name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    weights = copy("cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    short = copy("short") / "model.safetensors"
    tensors = load_file(short)
    del tensors["model.norm.weight" if "model.norm.weight" in tensors else "model.language_model.norm.weight"]
    save_file(tensors, short, {"format": "pt"})
    copy_with_config("unknown", model_type="nothing_known")
    copy_with_config("quantised", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    sorted(copy("shard", untied).glob("model-*.safetensors"))[0].unlink()
    (copy("index", untied) / "model.safetensors.index.json").write_text("{")
    cases = {
        "cut": r"cannot load a model from .*/cut' \(.*incomplete metadata",
        "short": r"short': the files lack model\.language_model\.norm\.weight; download it again",
        "unknown": r"cannot load a model from .*/unknown' \(.*nothing_known",
        "quantised": r"quantised' was saved quantised: give the original model",
        "shard": r"cannot load a model from .*/shard' \(.*model-00001-of-",
        "index": r"cannot load a model from .*/index' \(.*",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            merge_lora(str(tmp_path / name), str(sft), str(tmp_path / "merged"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output_path .*file/merged' cannot be created \(Not a directory\)"):
        merge_lora(tiny_model, str(sft), str(tmp_path / "file" / "merged"))
    with pytest.raises(UserError, match=r"has init_lora_weights='pissa', which is not supported"):
        merge_lora(
            tiny_model, copy_adapter(sft, tmp_path / "pissa", {"init_lora_weights": "pissa"}), str(tmp_path / "merged")
        )
    assert not list(tmp_path.glob("merged*"))


def test_a_full_disk_leaves_nothing(tiny_model, sft, tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("policy.export.save_file", full)
    with pytest.raises(
        UserError, match=r"merged.* cannot be written \(.*No space left.*\): choose a folder that has room"
    ):
        merge_lora(tiny_model, str(sft), str(tmp_path / "merged"))
    assert not list(tmp_path.glob("*merged*"))


def test_mistakes_are_named(tiny_model, untied, sft, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(sft, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(
        {k: t[:, :-1].clone() if "lora_A" in k else t for k, t in tensors.items()}, other / "adapter_model.safetensors"
    )
    output = str(tmp_path / "merged")
    with pytest.raises(
        UserError, match=r"made for another base: .* mismatch for .*layers.*lora_A.*\[4, 255\].*\[4, 256\]"
    ):
        merge_lora(tiny_model, str(other), output)
    with pytest.raises(UserError, match=r"has no adapter_config.json"):
        merge_lora(tiny_model, untied, output)
    with pytest.raises(UserError, match=r"--base_model .*nowhere.* is neither a folder nor a model on the hub"):
        merge_lora(str(tmp_path / "nowhere" / "at" / "all"), str(sft), output)
    assert not pathlib.Path(output).exists()
