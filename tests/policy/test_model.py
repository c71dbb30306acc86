"""Loading a model: its files must have exactly the tensors that it needs, and nothing in its folder is executed."""

import builtins
import functools
import json
import operator
import pathlib
import shutil
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.records import RequestLimits
from config import EngineFlags, PolicyFlags
from data import load_processor
from merge_lora import merge_lora
from policy.families import ImageLimits, find_family, load_image_processor
from policy.model import check_trained, load_config, load_model, load_policy, stop_tokens
from policy.sharding import load_reference
from rollout import make_engine
from tests.helpers.marks import needs
from tests.helpers.models import save_tiny

SAVED_NAME = "model.layers.1.mlp.up_proj.weight"
WEIGHT = "model.language_model.layers.1.mlp.up_proj.weight"  # its name in memory
FLAGS = PolicyFlags(compile=False)
CPU = torch.device("cpu")


@pytest.fixture
def damaged(tiny_model, tmp_path):
    """Return a function that copies the tiny model with other tensors or with other settings in config.json."""

    def copy(change=None, **settings) -> str:
        folder = tmp_path / "damaged"
        shutil.copytree(tiny_model, folder)
        if change is not None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        return str(folder)

    return copy


DAMAGES = {
    "missing": (lambda tensors: tensors.pop(SAVED_NAME), rf"the files lack {WEIGHT}; download it again"),
    "unexpected": (
        lambda tensors: tensors.update({f"model.layers.{i}.mlp.up_proj.weight": torch.ones(2) for i in range(5, 10)}),
        r"the model does not have \S*layers\.5\.\S*, \S*layers\.6\.\S*, \S*layers\.7\.\S* and 2 more; download",
    ),
    "of another shape": (
        lambda tensors: tensors.update({SAVED_NAME: torch.ones(3, 3)}),
        rf"a different shape in the files: {WEIGHT}; download",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_tensors_that_do_not_fit_are_named(damaged, name):
    """transformers loads all of them with a warning; a missing tensor would be trained from random numbers."""
    change, message = DAMAGES[name]
    with pytest.raises(UserError, match=message):
        load_policy(damaged(change), FLAGS, CPU)


def test_tied_weights_and_computed_buffers_may_be_absent_or_present(damaged):
    def add_buffers(tensors: dict) -> None:
        assert "lm_head.weight" not in tensors
        tensors["model.rotary_emb.inv_freq"] = torch.ones(3)  # saved by old releases
        tensors["visual.rotary_pos_emb.inv_freq"] = torch.ones(3)

    load_model(damaged(add_buffers), torch.float32)


def test_an_lm_head_that_the_config_ties_is_refused(damaged):
    """transformers would load it, but the other processes of a run build the model from the config alone."""

    def add_head(tensors: dict) -> None:
        tensors["lm_head.weight"] = torch.ones_like(tensors["model.embed_tokens.weight"])

    with pytest.raises(UserError, match="hold an lm_head of its own, but its config ties it"):
        load_model(damaged(add_head), torch.float32)


def test_reference_sampler_and_merge_make_the_same_check(damaged, tiny_model, sft, tmp_path):
    model = damaged(DAMAGES["missing"][0])
    processor, policy = load_processor(model, "count"), load_policy(tiny_model, FLAGS, CPU)
    for load in (
        lambda: load_reference(model, FLAGS, CPU, policy),
        lambda: make_engine(EngineFlags(engine="hf"), model, processor, CPU, torch.float32, RequestLimits(64, 1)),
        lambda: merge_lora(model, str(sft), str(tmp_path / "merged")),
    ):
        with pytest.raises(UserError, match="the files lack"):
            load()


class Code:
    """A pickled object that would write a file when it is read."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


def test_bin_files_are_read_but_code_in_them_is_not_run(damaged, tmp_path):
    folder = pathlib.Path(damaged())
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    model = load_model(str(folder), torch.float32)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    torch.save(weights | {"code": Code(tmp_path / "it ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot load a model from .*Weights only load failed"):
        load_model(str(folder), torch.float32)
    assert not (tmp_path / "it ran").exists()


def test_code_in_a_model_folder_is_refused_without_a_question(damaged, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("nobody may be at the keyboard"))
    folder = damaged(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    for load in (load_config, lambda name: load_processor(name, "count")):
        with pytest.raises(UserError, match="contains custom code") as error:
            load(folder)
        assert "\n" not in str(error.value)


ARCHITECTURES = {
    "bert": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
    "gpt2": dict(n_embd=32, n_layer=1, n_head=2),
    "t5": dict(d_model=32, num_layers=1, num_heads=2, d_ff=32, d_kv=16),
    "llava": {},
}


@needs("parts/families")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_are_refused_before_their_weights_are_read(damaged, name):
    folder = pathlib.Path(damaged())
    transformers.AutoConfig.for_model(name, **ARCHITECTURES[name]).save_pretrained(folder)
    with pytest.raises(UserError, match=rf"is a {name} model, which is not supported: use one of Qwen2.*, Aria, "):
        load_processor(str(folder), "count")


def load_all(folder: pathlib.Path) -> None:
    """Read everything in a model's folder, as a run does."""
    load_processor(str(folder), "count")
    load_policy(str(folder), FLAGS, CPU)


def set_value(path: pathlib.Path, names: str, value: object) -> None:
    """Set the value at `names`, such as "text_config.hidden_size", in the JSON file `path`."""
    content = json.loads(path.read_text())
    *parents, last = names.split(".")
    functools.reduce(operator.getitem, parents, content)[last] = value
    path.write_text(json.dumps(content))


FILES = ("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"\x00" * 99, b"[" * 100_000])
def test_damaged_files_are_named_in_one_line(tiny_model, tmp_path, name, content):
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(
        UserError, match=r"cannot load a model from '.*m' \((config|gener|tokenizer|image proc).*"
    ) as error:
        load_all(tmp_path / "m")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


SETTINGS = {
    "config.json": [
        ("text_config", {}),
        ("text_config", 3),
        ("vision_config", {}),
        ("vision_config", None),
        ("text_config.hidden_size", None),
        ("text_config.hidden_size", "many"),
        ("text_config.vocab_size", 10**12),
        ("text_config.intermediate_size", -1),
        ("text_config.num_hidden_layers", 0),
        ("text_config.num_attention_heads", 0),
        ("text_config.num_attention_heads", 7),
        ("text_config.num_key_value_heads", 3),
        ("text_config.layer_types", ["circular", "full_attention"]),
        ("text_config.hidden_act", "nonsense"),
        ("text_config.rope_parameters", {"rope_type": "nonsense", "rope_theta": 1e4}),
        ("text_config.rope_parameters", []),
        ("text_config.pad_token_id", 10**9),
        ("vision_config.patch_size", 0),
        ("vision_config.patch_size", 16),
        ("vision_config.spatial_merge_size", 3),
        ("vision_config.hidden_act", None),
        ("model_type", ["qwen2_5_vl"]),
        ("dtype", "float33"),
    ],
    "preprocessor_config.json": [
        ("patch_size", "14"),
        ("image_std", [0, 0, 0]),
    ],
}


@pytest.mark.parametrize(("name", "names", "value"), [(file, *pair) for file in SETTINGS for pair in SETTINGS[file]])
def test_odd_settings_are_named_in_one_line_before_any_weight_has_memory(
    tiny_model, tmp_path, monkeypatch, name, names, value
):
    shutil.copytree(tiny_model, tmp_path / "m")
    set_value(tmp_path / "m" / name, names, value)
    load = transformers.AutoModelForImageTextToText.from_pretrained

    def on_meta(*args: object, **options: object) -> object:
        if options.get("device_map") != {"": "meta"}:
            pytest.fail("it loaded weights")  # unlike an assertion, no error that would be named
        return load(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", on_meta)
    with pytest.raises(UserError, match=r"cannot load (a model from|the model) '.*m'") as error:
        load_all(tmp_path / "m")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [5, ["a"], {"a": "b"}, [{"name": "a", "template": "b"}], {"default": 3}])
@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_a_chat_template_that_is_no_text_is_named(tiny_model, tmp_path, template, name):
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    (tmp_path / "m" / "chat_template.json").write_text("{}")
    set_value(tmp_path / "m" / name, "chat_template", template)
    with pytest.raises(UserError, match=r"cannot load a model from '.*m' \((chat template|tokenizer): "):
        load_all(tmp_path / "m")


@pytest.mark.parametrize("eos", [{}, {"a": 1}, "many", 0.5, [1, "two"], [[1]], True])
def test_a_stop_token_that_is_no_number_is_refused(eos):
    with pytest.raises(UserError, match=r"eos_token_id .* is no token: correct gen"):
        stop_tokens({"eos_token_id": eos}, None, types.SimpleNamespace(eos_token_id=3))


def test_out_of_memory_is_not_taken_for_a_damaged_model(tiny_model, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(tiny_model, torch.float32)


def test_fewer_pixels_than_a_tile_has_leave_one_tile(tmp_path):
    model = save_tiny("internvl", tmp_path)
    config = load_config(model)
    vision = find_family(config).vision
    processor = load_image_processor(vision, model)
    limits = [ImageLimits(0, pixels) for pixels in (1280 * 28 * 28, 28 * 28, 55 * 55, 56 * 56)]
    assert [vision.prepare_images(processor, config, limit).count(400, 400) for limit in limits] == [20, 4, 4, 4]


def test_flags_for_parts_that_a_model_lacks_are_reported(tmp_path, capsys):
    model = save_tiny("qwen2_5", tmp_path)
    flags = PolicyFlags(train_vision=True, train_router=True)
    check_trained(load_policy(model, flags, torch.device("cpu")), flags)
    assert capsys.readouterr().err.splitlines() == [
        "frozen: nothing",
        "--train_vision has no effect: the model has no vision tower",
        "--train_router has no effect: the model has no routers",
    ]


def test_the_weights_that_are_trained_are_kept_in_float32(tiny_model):
    """In bfloat16, an update of 1e-6 would be rounded away."""
    for flags in (PolicyFlags(dtype="bfloat16", train_vision=True), PolicyFlags(dtype="bfloat16", lora_rank=4)):
        policy = load_policy(tiny_model, flags, CPU)
        dtypes = {(p.requires_grad, p.dtype) for p in policy.parameters()}
        assert dtypes == {(True, torch.float32)} | ({(False, torch.bfloat16)} if flags.has_adapter else set())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Gemma3TextConfig(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "depend on the length"),
        (
            transformers.Gemma3TextConfig(
                rope_parameters={
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            ),
            "depend on the length",
        ),
    ],
)
def test_attention_that_packing_cannot_honour_is_refused(config, reason, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        load_config(str(tmp_path))
