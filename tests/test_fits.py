"""`./run.sh fits`: the ways to train that fit into GPUs that are not here. Plans are arithmetic; no model is loaded."""

import functools
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

import config
from common import cli
from common.errors import UserError
from policy.model import empty_policy
from tests.helpers.marks import needs
from tests.helpers.scripts import ROOT

pytest.importorskip("apps", reason="needs apps/, which is not here")

from apps import fits
from apps.fits import METHODS


def options(**flags) -> dict[str, tuple[fits.Config, dict]]:
    """Return the flags and the plan of each method, the best first."""
    return {method: (cfg, estimate) for method, cfg, estimate in fits.plans(fits.Config(**flags))}


def test_what_fits_comes_with_its_command_and_its_memory(tiny_model, capsys):
    fits.main(fits.Config(model=tiny_model, gpus=2, memory=8, beta=0.01, reward=("a.py:f", "b.py:g=2")))
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w.*?): fits, with micro-batches of 10240 tokens$", printed, re.MULTILINE) == list(METHODS)
    assert printed.count("  GiB of each GPU's 7.9: ") == 4 and printed.count("; 0 in host memory\n") == 1
    commands = re.findall(r"^    (.*)$", printed, re.MULTILINE)
    for line, changed in zip(commands, METHODS.values(), strict=True):
        launcher, flags = shlex.split(line)[:4], shlex.split(line)[5:]
        assert launcher == [".venv/bin/torchrun", "--standalone", "--nproc_per_node", "2"]
        parsed = cli.parse(config.Config, flags)  # the command trains with the flags that were planned
        assert parsed == config.Config(
            model=tiny_model, task="vqa", data="train.jsonl", beta=0.01, reward=("a.py:f", "b.py:g=2"), **changed
        )


def test_the_number_of_prompts_may_be_changed(tiny_model, capsys):
    """Its default is not divided by 48."""
    fits.main(fits.Config(model=tiny_model, prompts_per_step=48))
    assert capsys.readouterr().out.count(" --prompts_per_step=48") == len(METHODS)


def test_a_size_is_found_in_upper_case():
    assert fits.Config(model="7B").model == "7b" and fits.Config(model="runs/7B").model == "runs/7B"


@needs("parts/plugins.py")
def test_an_environment_comes_with_its_plugin(tiny_model):
    """Without the plugin, the commands would not work."""
    flags = ["--model", tiny_model, "--env", "zoom"]
    done = subprocess.run([sys.executable, "-m", "apps.fits", *flags], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: --env zoom: add one with --plugin FILE\n")
    flags += ["--plugin", "examples/zoom.py"]
    done = subprocess.run([sys.executable, "-m", "apps.fits", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"--plugin={ROOT}/examples/zoom.py --env=zoom") == len(METHODS), done.stdout


def test_what_does_not_fit_says_why_and_comes_last(capsys):
    fits.main(fits.Config(model="3b", memory=16))
    printed = capsys.readouterr().out
    titles = re.findall(r"^(\w.*?): (fits|does not fit)", printed, re.MULTILINE)
    assert titles == [
        ("LoRA, 4-bit", "fits"),  # before LoRA, which has no room for vLLM
        ("LoRA", "fits"),
        ("full", "does not fit"),
        ("full, moments in host memory", "does not fit"),
    ]
    assert "no vLLM: transformers samples" in printed and "this GPU is too small by" in printed
    assert ".venv/bin/python grpo.py --task=vqa --model=Qwen/Qwen2.5-VL-3B-Instruct" in printed


def test_gpus_share_a_sampler_only_where_it_must_be():
    cfg, estimate = options(model="7b", gpus=2, memory=24)["LoRA"]
    assert cfg.tensor_parallel == 2 and not estimate["problem"] and "--tensor_parallel=2" in fits.command(cfg)
    assert options(model="7b", gpus=2, memory=80)["LoRA"][0].tensor_parallel == 1


@pytest.mark.parametrize("flags", [{"gpus": 0}, {"gpus": 9}, {"memory": 0}, {"gpus": 2, "tensor_parallel": 4}])
def test_nonsense_is_refused(flags):
    with pytest.raises(ValueError, match="must"):
        fits.Config(**flags)


NAMES = [{name: "none"} for name in ("task", "loss_type", "engine", "template")]
NAMES += [{"advantage": "most"}, {"dual_clip": 1.1}]


@pytest.mark.parametrize(
    "flags",
    [{"lora_rank": 8}, {"offload": ("optimizer",)}, {"model": "no/such"}, {"engine": "policy", "gpus": 2}, *NAMES],
)
def test_a_mistake_is_one_line(flags):
    with pytest.raises(UserError, match=r"leave .*out|no model at|choose one of|cannot read 'none'|above"):
        fits.main(fits.Config(**flags))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"micro_batch_tokens": 10**8}, "full: does not fit: --micro_batch_tokens 100000000: there is room for "),
        ({"engine": "hf"}, "full: fits, with micro-batches of 10240 tokens, no vLLM: "),
        ({"train_router": True}, "LoRA: does not fit: train_router: an adapter leaves the routers frozen; "),
    ],
)
def test_flags_are_planned_for_as_grpo_takes_them(flags, says, tiny_model, capsys):
    fits.main(fits.Config(model=tiny_model, memory=8, **flags))
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{"hidden_size": -256}, {"num_attention_heads": 0}, {"hidden_act": "none"}])
def test_an_odd_config_is_refused_in_one_line(settings, tiny_model, tmp_path):
    config = json.loads(pathlib.Path(tiny_model, "config.json").read_text())
    config["text_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot load a model from"):
        fits.main(fits.Config(model=str(tmp_path)))


def rows() -> list[list[str]]:
    """Return the cells of the table of what fits."""
    text = (ROOT / "docs/cluster.md").read_text().partition("## What fits")[2].partition("\n## ")[0]
    return [line.replace("**", "").strip("| ").split(" | ") for line in re.findall(r"^\| \d+B .*", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["3B", "7B", "32B"])
def test_the_table_has_the_fewest_gpus(model, monkeypatch):
    @functools.cache
    def made(is_adapter: bool, in_4bit: bool):
        flags = {"lora_rank": 64 * is_adapter, "load_in_4bit": in_4bit}
        return empty_policy(fits.model_shape(model.lower(), fits.byte_tokenizer()), fits.Config(**flags))

    monkeypatch.setattr(fits, "empty_policy", lambda shape, cfg: made(cfg.has_adapter, cfg.load_in_4bit))
    mine = [row for row in rows() if row[0] == model]
    assert [row[1] for row in mine] == list(METHODS)
    for i, memory in enumerate((16, 24, 48, 80, 141)):
        found = {gpus: options(model=model.lower(), gpus=gpus, memory=memory) for gpus in (1, 2, 4, 8)}
        for _, method, *cells in mine:
            fewest = next((gpus for gpus in found if not found[gpus][method][1]["problem"]), None)
            want = "–"
            if fewest:
                cfg, estimate = found[fewest][method]
                want = str(fewest) + (f", shared by {cfg.tensor_parallel}" if cfg.tensor_parallel > 1 else "")
                want += "" if estimate["sampler"] else ", no vLLM"
            assert cells[i] == want, (method, memory)


def test_ctrl_c_during_an_import_has_no_traceback():
    line = "import apps; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_the_help_begins_with_the_gpus():
    command = [sys.executable, "-m", "apps.fits", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"^[│ ] --(\w+)", done.stdout, re.MULTILINE)[:3] == ["gpus", "memory", "model"]
