"""Time verl's GRPO trainer on workload W1 or W-tail; `apps/bench/speed.py --peer verl` runs it on W1.

    python apps/bench/peer_verl.py runs/bench/3b --steps 3                   # in an environment with verl 0.9.1
    python apps/bench/peer_verl.py runs/bench/3b --steps 3 --settings algorithm.rollout_correction.bypass_mode=False
    python apps/bench/peer_verl.py runs/bench/3b --prompts 64 --tokens 8192 --median 700 --beta 0         # W-tail
    python apps/bench/peer_verl.py runs/bench/3b --prompts 64 --tokens 8192 --median 700 --beta 0 \
        --settings trainer.v1.trainer_mode=colocate_async                     # with verl's own partial rollouts

verl is started as its examples start it, with its default trainer: FSDP2, the reference offloaded to host memory, and
a vLLM server on the same GPU that sleeps during the update. Its old log-probabilities are those of vLLM, which spares
it a forward pass. The model, image size, completion length, β and random rewards are those of W1, and the vision tower
is frozen (apps/bench/verl_extras.py).

Prints "STEP seconds GiB parts" for every step, including the first; `parts` is JSON, with verl's own names, and the
mean length of the completions.
"""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import pandas as pd
import tyro
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent


@dataclass
class Config:
    """Time verl on workload W1."""

    model: tyro.conf.Positional[str]
    """Folder of the model with random weights."""
    steps: int = 3
    """Number of steps, including the warm-up step, which comes first."""
    prompts: int = 32
    """Number of prompts per step, with 8 completions each."""
    tokens: int = 512
    """Length of every completion in tokens, or the maximum length if there is a median."""
    median: float = 0.0
    """Median of the lengths, which are then drawn from a log-normal distribution (apps/bench/lengths.py)."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the lengths, if there is a median."""
    side: int = 448
    """Width and height of the images in pixels."""
    beta: float = 0.01
    """Weight of the KL term."""
    micro_tokens: int = 65536
    """Number of tokens per forward and backward pass."""
    gpus: int = 1
    """Number of GPUs."""
    limit: float = 3600.0
    """Seconds after which verl is stopped."""
    settings: tuple[str, ...] = ()
    """Further settings of verl, as NAME=VALUE."""


def write_rows(cfg: Config, path: pathlib.Path) -> None:
    """Write questions about noise images: a batch for each step, and one that verl's partial rollouts draw ahead.

    Prompts differ in length: in a batch in which all prompts and all completions have one length, TransferQueue 0.1.11
    takes the four rows of M-RoPE positions for the dimension that varies, and verl stops.
    """
    rng, rows = np.random.default_rng(0), []
    for i in range(cfg.prompts * (cfg.steps + 1)):
        png = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (cfg.side, cfg.side, 3), dtype=np.uint8)).save(png, "PNG")
        question = f"<image>How many shapes? {i}" + "?" * (i % 3)
        rows.append(
            {
                "data_source": "noise",
                "prompt": [{"role": "user", "content": question}],
                "images": [{"bytes": png.getvalue()}],
                "reward_model": {"style": "rule", "ground_truth": "1"},
                "extra_info": {"index": i},
            }
        )
    pd.DataFrame(rows).to_parquet(path)


def length_settings(cfg: Config, folder: pathlib.Path) -> dict[str, object]:
    """Return verl's settings for completions of different lengths."""
    if not cfg.median:
        return {}
    loop = {"name": "log_normal_lengths", "_target_": "verl_lengths.LogNormalLengths"}
    path = folder / "agent_loop.yaml"
    path.write_text(json.dumps([loop | {"median": cfg.median, "sigma": cfg.sigma, "cap": cfg.tokens}]))
    agent = "actor_rollout_ref.rollout.agent"
    return {f"{agent}.default_agent_loop": loop["name"], f"{agent}.agent_loop_config_path": path}


def workload_settings(cfg: Config, data: pathlib.Path) -> dict[str, object]:
    """Return verl's settings for the workload."""
    model, actor, rollout = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": cfg.prompts,
        "data.max_prompt_length": 2048 if cfg.side > 504 else 512,
        "data.max_response_length": cfg.tokens,
        "data.filter_overlong_prompts": False,
        "data.image_key": "images",
        "data.shuffle": False,
        "data.dataloader_num_workers": 2,
        f"{model}.path": cfg.model,
        f"{model}.use_remove_padding": True,
        f"{model}.enable_gradient_checkpointing": True,
        f"{model}.use_fused_kernels": True,
        f"++{model}.external_lib": "verl_extras",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.ppo_mini_batch_size": cfg.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": cfg.micro_tokens,
        f"{actor}.use_kl_loss": cfg.beta > 0,
        f"{actor}.kl_loss_coef": cfg.beta,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.entropy_coeff": 0,
        "actor_rollout_ref.ref.fsdp_config.model_dtype": "bf16",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": 8,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.35,
        f"{rollout}.max_num_batched_tokens": 16384,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.free_cache_engine": True,
        "reward.custom_reward_function.path": HERE / "verl_extras.py",
        "reward.num_workers": 2,
        "trainer.n_gpus_per_node": cfg.gpus,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": cfg.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": '["console"]',
        "trainer.default_local_dir": data.parent / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": max(os.cpu_count(), 16),
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 6 * 2**30,
    }


def gpu_memory() -> float:
    """Return the memory in use on the first GPU, in GiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def main(cfg: Config) -> None:
    folder = pathlib.Path(f"{cfg.model}-verl").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "noise.parquet"
    write_rows(cfg, data)
    flags = [f"{name}={value}" for name, value in (workload_settings(cfg, data) | length_settings(cfg, folder)).items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *flags, *cfg.settings]
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    verl = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    timer = threading.Timer(cfg.limit, lambda: os.killpg(verl.pid, 9))
    timer.start()
    last_lines: deque[str] = deque(maxlen=60)
    with open(folder / "verl.log", "w") as log:
        for line in verl.stdout:
            log.write(line)
            last_lines.append(line)
            if found := re.search(r"step:\d+ - (.*)", line):
                pairs = re.findall(r"timing_s/([\w/]+):(?:np\.\w+\()?(-?[\d.]+(?:e[-+]?\d+)?)", found[1])
                parts = {name: round(float(value), 2) for name, value in pairs}
                parts["mean length"] = float(re.search(r"response_length/mean:(?:np\.\w+\()?([\d.]+)", line)[1])
                print(f"STEP {parts.pop('step'):.2f} {gpu_memory():.1f} {json.dumps(parts)}", flush=True)
    timer.cancel()
    if verl.wait():
        print("".join(last_lines))
        sys.exit(f"verl ended with status {verl.returncode}; its log is {folder / 'verl.log'}")


if __name__ == "__main__":
    main(tyro.cli(Config))
