"""An exported model is the folder of its base with other weights."""

import hashlib
import json
import os
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import load_state_dict

import grpo
from common.errors import RunStopped
from config import PolicyFlags
from merge_lora import merge_lora
from policy.base_files import Layout, settings_folder, stored_dtypes, stored_tensors
from policy.export import export
from policy.model import empty_model, load_config, load_model, load_policy, ties_lm_head
from tests.helpers.adapters import save_random_adapter
from tests.helpers.models import save_tiny
from tests.helpers.runs import config

CPU = torch.device("cpu")
SETTINGS = ["vocab.json", "merges.txt", "LICENSE", "README.md", "modeling_own.py", "card.png"]
NOT_SETTINGS = ["model.gguf", "consolidated.safetensors", "optimizer.pt", "trainer_state.json", ".gitattributes"]
NOT_SETTINGS += ["training_args.bin", "tf_model.h5", "rng_state_0.pth", "events.out.tfevents.1", "other.bin.index.json"]


def shard(folder: pathlib.Path, tensors: dict[str, torch.Tensor], suffix: str = "safetensors") -> None:
    """Store `tensors` in three files with an index, in `folder`."""
    (folder / "model.safetensors").unlink()
    stem, write = ("model", save_file) if suffix == "safetensors" else ("pytorch_model", torch.save)
    weight_map = {name: f"{stem}-0000{1 + i % 3}-of-00003.{suffix}" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        write(part, folder / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")


@pytest.fixture
def base(tiny_model, tmp_path) -> pathlib.Path:
    """A base in bfloat16 with float32 tensors, in three files, beside files that are copied and others that are not."""
    folder = pathlib.Path(shutil.copytree(tiny_model, tmp_path / "base"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors = {
        name: tensor.float() if "norm" in name or "q_proj" in name else tensor for name, tensor in tensors.items()
    }
    shard(folder, tensors)
    for name in SETTINGS + NOT_SETTINGS:
        (folder / name).write_bytes(name.encode())
    settings = json.loads((folder / "config.json").read_text())
    settings["torch_dtype"] = settings.pop("dtype")  # as releases before transformers 5 call it
    (folder / "config.json").write_text(json.dumps(settings, indent=4))
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    link = folder / "tokenizer_config.json"
    link.rename(tmp_path / "blob")
    link.symlink_to(tmp_path / "blob")
    return folder


def digests(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_but_for_weights_the_export_is_the_base_byte_for_byte(base, shapes, tmp_path):
    os.umask(0o027)
    try:
        grpo.main(config(str(base), shapes, tmp_path / "run", max_steps=1, learning_rate=0.1))
    finally:
        os.umask(0o022)
    final = tmp_path / "run" / "final"
    old, new = digests(base), digests(final)
    assert old.keys() - new.keys() == set(NOT_SETTINGS) and not new.keys() - old.keys()
    changed = {name for name in new if new[name] != old[name]}
    assert changed == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert not any(path.is_symlink() or path.is_dir() for path in final.iterdir())
    assert {path.stat().st_mode & 0o777 for path in final.iterdir()} == {0o640}
    before, after = stored_tensors(str(base)), stored_tensors(str(final))
    for file, tensors in before.items():
        written = after[str(final / pathlib.Path(file).name)]
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
            n: (t.shape, t.dtype) for n, t in written.items()
        }
        for name, tensor in load_file(file).items():
            is_frozen = "visual" in name  # the vision tower
            assert load_file(final / pathlib.Path(file).name)[name].equal(tensor) == is_frozen, name


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_merge_changes_the_adapted_tensors_alone(base, tmp_path, dtype):
    """A tensor that the adapter leaves alone keeps its bits, even where it is more exact than the rest of the base."""
    save_random_adapter(str(base), tmp_path / "adapter", target_modules=["q_proj"])
    merge_lora(str(base), str(tmp_path / "adapter"), str(tmp_path / "merged"), dtype=dtype)
    for file in stored_tensors(str(base)):
        merged = load_file(tmp_path / "merged" / pathlib.Path(file).name)
        for name, tensor in load_file(file).items():
            want = tensor.half() if dtype == "float16" else tensor
            assert merged[name].dtype == want.dtype
            assert merged[name].equal(want) == ("q_proj.weight" not in name), name
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert settings["torch_dtype"] == ("float16" if dtype == "float16" else "float32")
    want = json.loads((base / "config.json").read_text()) | {"torch_dtype": settings["torch_dtype"]}
    assert settings | {"text_config": 0, "vision_config": 0} == want | {"text_config": 0, "vision_config": 0}


def test_bin_files_become_safetensors_with_the_same_split(tiny_model, tmp_path):
    base = pathlib.Path(shutil.copytree(tiny_model, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # one storage, as in files of tied models
    shard(base, tensors, "bin")
    policy = load_policy(str(base), PolicyFlags(), CPU)
    assert ties_lm_head(policy.model)
    for parameter in policy.model.parameters():
        parameter.data += 1
    export(policy, str(base), str(tmp_path / "final"), str(tmp_path))
    weight_map = json.loads((base / "pytorch_model.bin.index.json").read_text())["weight_map"]
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: file.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for name, file in weight_map.items()
    }
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / "final" / file)[name].equal(tensors[name] + 1), name
    assert not list((tmp_path / "final").glob("*.bin*"))


def test_experts_are_written_as_the_base_stores_them(tmp_path):
    """The hub's Qwen3-VL-MoE stores (experts, in, out); transformers 5 computes with (experts, out, in)."""
    base = pathlib.Path(save_tiny("qwen3_vl_moe", tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    hub = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}
    for name, stored in (("transformers 5", tensors), ("hub", hub)):
        save_file(stored, base / "model.safetensors", {"format": "pt"})
        policy = load_policy(str(base), PolicyFlags(), CPU)
        want = {n: p.detach().clone().mul_(2) for n, p in policy.model.named_parameters()}
        for n, parameter in policy.model.named_parameters():
            parameter.data.copy_(want[n])
        export(policy, str(base), str(tmp_path / name), str(tmp_path))
        written = load_file(tmp_path / name / "model.safetensors")
        assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in stored.items()}
        again = load_model(str(tmp_path / name), torch.float32)
        assert all(parameter.equal(want[n]) for n, parameter in again.named_parameters())


def test_tensors_that_were_never_loaded_are_copied(tmp_path):
    """Qwen3.5 is published with a layer for multi-token prediction."""
    base = pathlib.Path(save_tiny("qwen3_5", tmp_path / "base"))
    tensors = load_file(base / "model.safetensors") | {"mtp.fc.weight": torch.rand(64, 128)}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    export(load_policy(str(base), PolicyFlags(), CPU), str(base), str(tmp_path / "final"), str(tmp_path))
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert written.keys() == tensors.keys() and all(written[name].equal(tensors[name]) for name in tensors)


def test_an_lm_head_of_which_the_config_says_nothing_is_untied(tmp_path):
    """Releases of transformers before 5 wrote InternVL so, and load it untied."""
    base = pathlib.Path(save_tiny("internvl", tmp_path / "base"))
    settings = json.loads((base / "config.json").read_text())
    for level in (settings, settings["text_config"]):
        level.pop("tie_word_embeddings", None)
    (base / "config.json").write_text(json.dumps(settings))
    policy = load_policy(str(base), PolicyFlags(), CPU)
    assert not ties_lm_head(policy.model) and not ties_lm_head(empty_model(str(base)))
    policy.model.lm_head.weight.data += 1
    export(policy, str(base), str(tmp_path / "final"), str(tmp_path))
    assert (tmp_path / "final" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert load_model(str(tmp_path / "final"), torch.float32).lm_head.weight.equal(policy.model.lm_head.weight)
    tensors = load_file(base / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert load_config(str(base)).tie_word_embeddings, "without an lm_head, it can only be the embedding"


def test_a_merge_that_unties_the_lm_head_says_so(tiny_model, tmp_path):
    save_random_adapter(tiny_model, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["lm_head"])
    base = pathlib.Path(shutil.copytree(tiny_model, tmp_path / "base"))
    settings = json.loads((base / "config.json").read_text())
    del settings["text_config"]["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(settings))
    merge_lora(str(base), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged["tie_word_embeddings"] is merged["text_config"]["tie_word_embeddings"] is False
    del merged["text_config"]["tie_word_embeddings"]
    assert merged == settings | {"tie_word_embeddings": False}
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert not tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("train_vision", [False, True])
def test_a_new_adapter_names_its_layers(tiny_model, tmp_path, train_vision):
    policy = load_policy(tiny_model, PolicyFlags(lora_rank=2, train_vision=train_vision), CPU)
    export(policy, tiny_model, str(tmp_path / "final"), str(tmp_path))
    targets = json.loads((tmp_path / "final" / "adapter_config.json").read_text())["target_modules"]
    layers = dict(policy.model.named_modules())
    assert targets == sorted(targets) and all(hasattr(layers[name], "lora_A") for name in targets)
    keys = load_file(tmp_path / "final" / "adapter_model.safetensors").keys()
    assert {key.removeprefix("base_model.model.").rsplit(".lora_")[0] for key in keys} == set(targets)
    assert (tmp_path / "final" / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


def test_the_files_of_a_hub_name_are_kept_with_the_run(tiny_model, shapes, tmp_path, monkeypatch):
    """The end of a run, and a later export of a checkpoint, need neither the network nor the cache's settings."""
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / "c0ffee"
    shutil.copytree(tiny_model, snapshot)
    (snapshot / "LICENSE").write_text("free")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    settings = settings_folder("owner/name", str(tmp_path / "run"), keep=True)
    assert (settings / "LICENSE").read_text() == "free"
    kept = digests(tmp_path / "run" / "base")
    assert kept == {name: digest for name, digest in digests(snapshot).items() if name != "model.safetensors"}
    (snapshot / "LICENSE").unlink()
    policy = load_policy("owner/name", PolicyFlags(), CPU)
    export(policy, "owner/name", str(tmp_path / "final"), str(tmp_path / "run"))
    assert digests(tmp_path / "final") == kept | {"model.safetensors": digests(snapshot)["model.safetensors"]}


def test_a_base_that_is_gone_at_the_end_is_named(tiny_model, tmp_path):
    base = pathlib.Path(shutil.copytree(tiny_model, tmp_path / "base"))
    policy = load_policy(str(base), PolicyFlags(), CPU)
    (base / "model.safetensors").unlink()
    with pytest.raises(RunStopped, match=r"final' could not be written \(cannot load a model from .*/base'"):
        export(policy, str(base), str(tmp_path / "final"), str(tmp_path))
    assert not list(tmp_path.glob("final*"))


def test_dtypes_are_those_of_the_files(base):
    assert stored_dtypes(str(base)) == (torch.bfloat16, torch.float32)


def test_the_layout_names_every_parameter(base):
    model = empty_model(str(base))
    layout = Layout(model, stored_tensors(str(base)), dict(model.named_parameters()))
    names = {parameter for names in layout.parameters.values() for parameter in names.values()}
    assert names == {name for name, _ in model.named_parameters()}
    assert all(load_state_dict(path).keys() == names.keys() for path, names in layout.parameters.items())
