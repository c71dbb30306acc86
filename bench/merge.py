"""How much memory merging an adapter takes: a base with random weights, a random adapter, merge_lora.py, its peak.

python bench/merge.py --shape 7b                        # 17 GB for the base on disk, as much again for the merged model
python bench/merge.py --shape 7b --layers 4 --whole     # 5 GB, with embedding and lm_head of the 7B in the adapter
"""

import json
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoConfig

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import cli
from lora import POLICY, new_adapter, write_adapter
from model import auto_class


@dataclass
class Config:
    """Measure merge_lora.py."""

    shape: Literal["3b", "7b", "tiny"] = "7b"
    """The model's shape."""
    layers: int = 0
    """Decoder layers of a smaller model of that width; 0: as many as the shape has."""
    rank: int = 16
    """The adapter's rank."""
    whole: bool = False
    """Embedding and lm_head in the adapter too (`modules_to_save`), in float32, the most it can hold."""
    folder: str = "runs/bench"
    """Where model, adapter and merged model are written."""


def make_adapter(base: pathlib.Path, folder: pathlib.Path, rank: int, whole: bool) -> None:
    """An adapter over every linear layer of the decoder stack, with random A and B; and, `whole`, what is saved as it
    is."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(base)
        model = auto_class(config).from_config(config)
    new_adapter(model, rank, 0, vision=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = {
        f"base_model.model.{name.replace(f'.{POLICY}.', '.')}": 0.02 * torch.randn(parameter.shape)
        for name, parameter in trained.items()
    }
    if whole:
        model.peft_config[POLICY].modules_to_save = ["embed_tokens", "lm_head"]
        for name in ("lm_head", "model.language_model.embed_tokens"):
            tensors[f"base_model.model.{name}.weight"] = 0.02 * torch.randn(model.get_submodule(name).weight.shape)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_adapter(model, tensors, str(base), folder)


def main(cfg: Config) -> None:
    folder = pathlib.Path(cfg.folder)
    name = cfg.shape + (f"-{cfg.layers}" if cfg.layers else "")
    base, adapter, merged = folder / name, folder / f"{name}-adapter", folder / f"{name}-merged"
    if not (base / "config.json").is_file():  # in a process of its own: what it takes is not what is measured
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import pathlib, speed; "
        code += f"speed.SHAPES[{cfg.shape!r}]['layers'] = {cfg.layers} or speed.SHAPES[{cfg.shape!r}]['layers']; "
        code += f"speed.make_model(pathlib.Path({str(base)!r}), {cfg.shape!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
    make_adapter(base, adapter, cfg.rank, cfg.whole)
    shutil.rmtree(merged, ignore_errors=True)
    started = time.perf_counter()
    flags = [f"--base_model={base}", f"--lora_model={adapter}", f"--output_path={merged}"]
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done)"
    )
    command = [sys.executable, "-c", code, sys.executable, str(HERE.parent / "merge_lora.py"), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *said, peak = done.stdout.splitlines()
    print("\n".join(said))
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    found = {"shape": name, "weights_gb": size / 1e9, "peak_gb": int(peak) * 1024 / 1e9}
    print(json.dumps(found | {"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    cli.run(main, Config)
