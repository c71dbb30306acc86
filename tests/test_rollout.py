"""Compare HFEngine with plain transformers generation and with the trainer's packed forward pass.

Guards against: log-probabilities of a distribution other than the one sampled from, left padding that leaks into
attention or positions, completions that depend on their batch, and stop tokens that are dropped or counted twice.
"""

import importlib.util
import os
import re
import sys

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
)

import evaluate
import grpo
from common.errors import RunStopped, UserError
from common.files import read_jsonl
from common.records import Completion, Group, Sample, Sampling
from config import EngineFlags, PolicyFlags
from data import encode_prompt, encode_prompts, load_processor
from packing import pack
from policy.forward import enable_packed_forward, token_logprobs
from policy.hf_engine import HFEngine, sample
from policy.model import cache_image_features, load_config, load_policy, stop_tokens
from policy.vllm_checks import check_pixels, check_weights
from rollout import RequestLimits, VLLMEngine, choose_engine, make_engine, undo_global_changes
from tests.helpers import runs


@pytest.fixture(scope="module")
def processor(tiny_model):
    return load_processor(tiny_model, "count")


@pytest.fixture(scope="module")
def engine(tiny_model, processor) -> HFEngine:
    return make_engine(
        EngineFlags(engine="hf"), tiny_model, processor, torch.device("cpu"), torch.float32, RequestLimits(0, 1)
    )


@pytest.fixture(scope="module")
def prompts(processor):
    def image(w, h, shade):
        return Image.new("RGB", (w, h), (shade, 90, 200))

    samples = [
        Sample("<image>How many?", "1", [image(84, 84, 20)], "a"),
        Sample("no image here", "1", [], "b"),
        Sample("<image>and<image> which?", "1", [image(56, 112, 250), image(84, 56, 130)], "c"),
    ]
    return [encode_prompt(s, processor) for s in samples]


def test_logprobs_are_those_of_the_packed_forward(tiny_model, engine, prompts):
    """Sampler and trainer agree on every token, including image placeholders that were sampled as text."""
    rollouts = engine.generate(prompts, [1, 2, 3], Sampling(24, 40, temperature=0.8))
    model = AutoModelForImageTextToText.from_pretrained(tiny_model)
    enable_packed_forward(model)
    completions = [[Completion(r.ids, r.sampling_logp) for r in group] for group in rollouts]
    batch = pack([Group(p, c) for p, c in zip(prompts, completions)])
    placeholder = model.config.image_token_id
    assert (batch.targets == placeholder).any(), "no completion contains a placeholder: sample more"
    with torch.no_grad():
        logp, _ = token_logprobs(model, batch, temperature=0.8)
    torch.testing.assert_close(logp, batch.values.sampling_logp, atol=1e-5, rtol=0)


def test_greedy_equals_transformers_generate(tiny_model, engine, prompts):
    model = AutoModelForImageTextToText.from_pretrained(tiny_model).eval()
    got = engine.generate(prompts, [0, 0, 0], Sampling(1, 12, temperature=0))
    for prompt, (rollout,) in zip(prompts, got):
        ids = prompt.ids[None]
        inputs = {**prompt.vision, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        want = model.generate(ids, **inputs, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert rollout.ids.tolist() == want[: len(rollout.ids)].tolist()


def test_completions_depend_on_their_seed_alone(engine, prompts):
    together = engine.generate(prompts, [7, 8, 9], Sampling(3, 10))
    for i, prompt in enumerate(prompts):
        alone = engine.generate([prompt], [7 + i], Sampling(3, 10))[0]
        assert [r.ids.tolist() for r in alone] == [r.ids.tolist() for r in together[i]]
    other = engine.generate(prompts[:1], [70], Sampling(3, 10))[0]
    assert [r.ids.tolist() for r in other] != [r.ids.tolist() for r in together[0]]
    assert len({tuple(r.ids.tolist()) for r in together[0]}) == 3, "completions of a group must differ"


def test_stop_tokens_end_a_completion_and_truncation_is_recorded(engine, prompts, monkeypatch):
    frequent = torch.cat([r.ids for r in engine.generate(prompts, [1, 2, 3], Sampling(8, 30))[1]]).mode().values
    monkeypatch.setattr(engine, "stop", frequent[None])
    rollouts = [r for group in engine.generate(prompts, [1, 2, 3], Sampling(8, 30)) for r in group]
    ended = [r for r in rollouts if not r.truncated]
    assert ended
    assert len(ended) < len(rollouts)
    for r in ended:
        assert r.ids[-1] == frequent
        assert frequent not in r.ids[:-1]
        assert r.text == engine.tokenizer.decode(r.ids[:-1])
        assert len(r.sampling_logp) == len(r.ids) <= 30
    for r in rollouts:
        if r.truncated:
            assert len(r.ids) == 30
            assert frequent not in r.ids


def test_features_belong_to_pictures_not_to_rows(tiny_model, processor):
    """The feature cache is keyed by image content, because rows of different splits can have the same name.
    Identical images are encoded once."""

    def prompt(shade: int):
        return encode_prompt(Sample("<image>?", "1", [Image.new("RGB", (84, 84), (shade, 9, 9))], "row 1"), processor)

    policy, feature_cache = load_policy(tiny_model, PolicyFlags(), torch.device("cpu")), {}
    first, other, repeated = prompt(10), prompt(200), prompt(10)
    cache_image_features(policy, [first], feature_cache)
    cache_image_features(policy, [other, repeated], feature_cache)
    assert not torch.equal(first.features, other.features)
    assert torch.equal(first.features, repeated.features)
    assert len(feature_cache) == 2


def test_every_end_token_of_the_generation_config_counts(tiny_model):
    """vLLM returns the generation config as a dict; transformers returns it as an object."""
    tokenizer = load_processor(tiny_model, "count").tokenizer
    for config in (GenerationConfig(eos_token_id=[5, 7]), {"eos_token_id": [5, 7]}, {"eos_token_id": 5}):
        want = {5, 7} if not isinstance(config, dict) or isinstance(config["eos_token_id"], list) else {5}
        assert set(stop_tokens(config, PreTrainedConfig(), tokenizer)) == want | {tokenizer.eos_token_id}


def test_a_completion_of_one_token(engine, prompts):
    rollouts = engine.generate(prompts, [1, 2, 3], Sampling(2, 1))
    assert all(len(r.ids) == 1 for group in rollouts for r in group)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).repeat(40_000, 1)
    uniform = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logp = sample(logits, uniform, temperature=0.7)
    want = (logits[0] / 0.7).softmax(-1)
    got = tokens.bincount(minlength=4) / len(tokens)
    assert (got - want).abs().max() < 0.01
    torch.testing.assert_close(logp, want.log()[tokens], atol=1e-6, rtol=0)


def test_top_p_keeps_the_token_that_crosses_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logp = sample(logits, uniform, temperature=1.0, top_p=0.7)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logp.exp()[tokens == 0][0], torch.tensor(0.5 / 0.8), atol=1e-6, rtol=0)


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    tokens, logp = sample(logits, torch.zeros(50, dtype=torch.float64), temperature=0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1), atol=1e-6, rtol=0)


# --- vLLM without a GPU -----------------------------------------------------------------------------------------------


def test_vllm_that_is_missing_or_broken_says_how_to_go_on(tiny_model, processor, tmp_path, monkeypatch):
    flags, cpu = EngineFlags(engine="vllm"), torch.device("cpu")
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(UserError, match=r"vLLM is not installed; run pip install -r requirements-gpu"):
            choose_engine(flags, cpu)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('undefined symbol: built for another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("RANK", "LOCAL_RANK", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=r"vLLM did not start .ImportError: undefined symbol.*or use --engine hf"):
        VLLMEngine(flags, tiny_model, processor, torch.bfloat16, RequestLimits(100, 1))
    with pytest.raises(UserError, match="there is no GPU"):
        choose_engine(flags, cpu)


def test_auto_says_what_it_chose(capsys):
    assert choose_engine(EngineFlags(), torch.device("cpu")) == "hf"
    assert re.search(r"sampler: transformers \d.* \(there is no GPU\)", capsys.readouterr().err)


def test_pixels_are_compared_picture_by_picture(processor):
    images = [Image.new("RGB", (56, 28 * (1 + i)), (40 * i, 9, 90)) for i in range(3)]
    samples = [Sample("<image>?", "1", [image], f"row {i}") for i, image in enumerate(images)]
    prompts = encode_prompts(samples, processor)
    received = [prompt.vision["pixel_values"].bfloat16().float() for prompt in reversed(prompts)]
    check_pixels(prompts, received)
    received[0] = received[0] + 0.1
    with pytest.raises(UserError, match="row 2: vLLM's vision tower did not get the trainer's pixels"):
        check_pixels(prompts, received)
    with pytest.raises(UserError, match="row 0"):
        check_pixels(prompts, [])


# --- the policy itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ({}, 0.0),  # without an adapter, the copy has exactly the policy's weights
        ({"lora_rank": 4, "lora_dropout": 0.1, "activation_checkpointing": "full"}, 1e-5),
    ],
)
def test_the_policy_itself_samples_what_a_copy_samples(tiny_model, shapes, tmp_path, flags, tolerance):
    """Sampling also leaves the policy as it was: packed, in training mode, with dropout."""
    rows = {}
    for engine in ("hf", "policy"):
        grpo.main(runs.config(tiny_model, shapes, tmp_path / engine, max_steps=2, engine=engine, **flags))
        rows[engine] = read_jsonl(tmp_path / engine / "metrics.jsonl")
    for copy, policy in zip(*rows.values()):
        for name in ("reward", "completions/mean_length", "grad_norm", "loss", "entropy"):
            assert policy[name] == pytest.approx(copy[name], abs=tolerance, rel=0), name
        assert policy["sampling/logp_difference_mean"] < 1e-5


def test_a_4_bit_policy_agrees_with_its_sampler(tiny_model, shapes, tmp_path):
    """A sampler with merged weights, as vLLM has, differs by 0.01 nats."""
    four_bit = dict(lora_rank=4, load_in_4bit=True, dtype="bfloat16", engine="policy", learning_rate=1e-2)
    grpo.main(runs.config(tiny_model, shapes, tmp_path / "run", max_steps=2, **four_bit))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert max(row["sampling/logp_difference_mean"] for row in rows) < 0.005
    flags = dict(model=tiny_model, adapter=f"{tmp_path}/run/final", data=shapes, limit=2, max_tokens=8, n=2)
    evaluate.main(evaluate.Config(**flags, load_in_4bit=True, temperature=1.0, output=f"{tmp_path}/eval"))
    assert len(read_jsonl(tmp_path / "eval" / "predictions.jsonl")) == 2


def test_sampling_that_runs_out_of_memory_continues_with_smaller_batches(engine, prompts, monkeypatch, capsys):
    want = engine.generate(prompts, [1, 2, 3], Sampling(2, 5))
    decode, sizes, room = HFEngine._decode, [], [1]

    def small_gpu(self, some, *args):
        sizes.append(len(some))
        if len(some) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return decode(self, some, *args)

    monkeypatch.setattr(HFEngine, "_decode", small_gpu)
    monkeypatch.setattr(engine, "max_sequences", 512)
    got = engine.generate(prompts, [1, 2, 3], Sampling(2, 5))
    assert sizes == [3, 1, 1, 1]
    assert [r.ids.tolist() for group in got for r in group] == [r.ids.tolist() for group in want for r in group]
    assert "sampling at most 3 sequences at once" in capsys.readouterr().err
    room[0] = 0
    with pytest.raises(RunStopped, match=r"out of GPU memory in sampling\. What helps: a smaller --num_generations"):
        engine.generate(prompts, [1, 2, 3], Sampling(4, 5))


def test_where_the_policy_cannot_sample_is_said(tiny_model, monkeypatch):
    flags, cpu = EngineFlags(engine="policy"), torch.device("cpu")
    assert choose_engine(flags, cpu) == "policy"
    monkeypatch.setattr("rollout.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="--engine policy works in one process only"):
        choose_engine(flags, cpu)
    with pytest.raises(ValueError, match="engine policy is for training"):
        evaluate.Config(model=tiny_model, data="rows", engine="policy")
    with pytest.raises(ValueError, match="load_in_4bit needs an adapter"):
        evaluate.Config(model=tiny_model, data="rows", load_in_4bit=True)
    with pytest.raises(ValueError, match="the baseline must be the output folder of an earlier evaluation"):
        evaluate.Config(model=tiny_model, adapter="a", baseline=tiny_model, data="rows", load_in_4bit=True)


def test_what_vllm_changes_in_the_process_is_undone(tiny_model, monkeypatch):
    """vLLM sets the compiler's environment variables, and registers configuration classes of its own."""

    class VLLMConfig(Qwen2_5_VLConfig):
        pass

    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with undo_global_changes(tiny_model):
        monkeypatch.setenv("TRITON_CACHE_DIR", "/vllm")
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        AutoConfig.register("qwen2_5_vl", VLLMConfig, exist_ok=True)
        assert type(load_config(tiny_model)) is VLLMConfig
    assert type(load_config(tiny_model)) is Qwen2_5_VLConfig
    assert os.environ["TRITON_CACHE_DIR"] == "/before"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ


def test_an_lm_head_that_vllm_does_not_tie_to_the_embedding_is_found():
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    model = torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})
    sent = [("embed_tokens.weight", embedding.weight)]
    with pytest.raises(RunStopped, match="set tie_word_embeddings in the text_config"):
        check_weights(sent, model)
    check_weights([*sent, ("lm_head.weight", head.weight)], model)
    head.weight = embedding.weight
    check_weights(sent, model)
