"""Compare HFEngine with plain transformers generation and with the trainer's packed forward pass.

Guards against: log-probabilities of a distribution other than the one sampled from, left padding that leaks into
attention or positions, completions that depend on their batch, and stop tokens that are dropped or counted twice.
"""

import importlib.util
import math
import os
import re
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

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
from common.records import Completion, Group, Prompt, Request, RequestLimits, Rollout, Sampling
from config import EngineFlags, PolicyFlags
from data import encode_prompt, encode_prompts, load_processor
from packing import pack
from policy.forward import enable_packed_forward, token_logprobs
from policy.memory import Plan
from policy.model import cache_image_features, load_config, load_model, load_policy, stop_tokens
from policy.optimizer import ShardAdamW
from rollout import (
    ENGINES,
    NOT_STARTED,
    EngineEntry,
    check_engine_available,
    choose_engine,
    make_engine,
    prompt_seed,
)
from sampling import vllm_start
from sampling.hf_engine import HFEngine, sample
from sampling.vllm_checks import check_expansion, check_pixels
from sampling.vllm_engine import VLLMEngine
from sampling.vllm_start import undo_global_changes
from tests.helpers import runs
from tests.helpers.fake_vllm import FakeEngine
from tests.helpers.rows import make_sample
from tests.helpers.samplers import groups_of


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
        make_sample("<image>How many?", "1", [image(84, 84, 20)], "a"),
        make_sample("no image here", "1", [], "b"),
        make_sample("<image>and<image> which?", "1", [image(56, 112, 250), image(84, 56, 130)], "c"),
    ]
    return [encode_prompt(s, processor) for s in samples]


def test_logprobs_are_those_of_the_packed_forward(tiny_model, engine, prompts):
    """Sampler and trainer agree on every token, including image placeholders that were sampled as text."""
    rollouts = groups_of(engine, prompts, [1, 2, 3], Sampling(24, 40, temperature=0.8))
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
    got = groups_of(engine, prompts, [0, 0, 0], Sampling(1, 12, temperature=0))
    for prompt, (rollout,) in zip(prompts, got):
        ids = prompt.ids[None]
        inputs = {**prompt.vision, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        want = model.generate(ids, **inputs, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert rollout.ids.tolist() == want[: len(rollout.ids)].tolist()


def test_completions_depend_on_their_seed_alone(engine, prompts):
    together = groups_of(engine, prompts, [7, 8, 9], Sampling(3, 10))
    for i, prompt in enumerate(prompts):
        alone = groups_of(engine, [prompt], [7 + i], Sampling(3, 10))[0]
        assert [r.ids.tolist() for r in alone] == [r.ids.tolist() for r in together[i]]
    other = groups_of(engine, prompts[:1], [70], Sampling(3, 10))[0]
    assert [r.ids.tolist() for r in other] != [r.ids.tolist() for r in together[0]]
    assert len({tuple(r.ids.tolist()) for r in together[0]}) == 3, "completions of a group must differ"


def test_the_random_numbers_of_a_prompt_are_those_of_earlier_versions(engine, prompts):
    """Otherwise, a resumed run would sample other completions. A larger limit only appends numbers.

    A model to which all tokens are equally likely shows them: each token is its number times the vocabulary's size.
    """
    engine = deepcopy(engine)
    engine.model.lm_head.weight.data.zero_()
    engine.stop = engine.stop[:0]
    numbers = torch.rand(8, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64).T
    want = (numbers * len(engine.model.lm_head.weight)).long()
    for max_tokens in (5, 8):
        (group,) = groups_of(engine, prompts[1:2], [7], Sampling(3, max_tokens))
        assert [rollout.ids.tolist() for rollout in group] == want[:, :max_tokens].tolist()


def test_what_a_step_asks_of_the_sampler(tiny_model, shapes, tmp_path, monkeypatch):
    """The sampler is woken before it gets the weights, and sleeps before the update: vLLM's memory is the trainer's.

    Seeds depend on the run's seed, so that another seed samples other completions of the same row. Without
    `oversample`, there is nothing to continue or to pause, which would take longer.
    """
    calls, asked = [], []

    def record(owner: type, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (calls.append(name), method(*args, **kwargs))[1])

    generate = HFEngine.generate

    def sampled(engine, requests, sampling, **others):
        asked.append((list(dict.fromkeys(request.seed for request in requests)), others))
        return generate(engine, requests, sampling, **others)

    monkeypatch.setattr(HFEngine, "generate", sampled)
    for name in ("wake_up", "sync_weights", "generate", "sleep"):
        record(HFEngine, name)
    record(ShardAdamW, "step")
    grpo.main(runs.config(tiny_model, shapes, tmp_path, max_steps=1, seed=1))
    assert calls == ["sleep", "wake_up", "sync_weights", "generate", "sleep", "step"]
    assert asked == [([prompt_seed(1, position) for position in range(4)], {})]


def test_stop_tokens_end_a_completion_and_truncation_is_recorded(engine, prompts, monkeypatch):
    frequent = torch.cat([r.ids for r in groups_of(engine, prompts, [1, 2, 3], Sampling(8, 30))[1]]).mode().values
    monkeypatch.setattr(engine, "stop", frequent[None])
    rollouts = [r for group in groups_of(engine, prompts, [1, 2, 3], Sampling(8, 30)) for r in group]
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
        return encode_prompt(
            make_sample("<image>?", "1", [Image.new("RGB", (84, 84), (shade, 9, 9))], "row 1"), processor
        )

    policy, feature_cache = load_policy(tiny_model, PolicyFlags(), torch.device("cpu")), {}
    first, other, repeated = prompt(10), prompt(200), prompt(10)
    cache_image_features(policy, [first], feature_cache)
    cache_image_features(policy, [other, repeated], feature_cache)
    assert not torch.equal(first.features, other.features)
    assert torch.equal(first.features, repeated.features)
    assert len(feature_cache) == 2


def test_the_oldest_image_features_are_forgotten_but_not_before_their_step(tiny_model, processor, monkeypatch):
    samples = [make_sample("<image>?", "1", [Image.new("RGB", (84, 84), (i, 9, 9))], f"row {i}") for i in range(3)]
    first, second, third = prompts = encode_prompts(samples, processor)
    policy, feature_cache = load_policy(tiny_model, PolicyFlags(), torch.device("cpu")), {}
    cache_image_features(policy, [first], feature_cache)
    monkeypatch.setattr("policy.model.FEATURE_CACHE_BYTES", 2 * first.features.nbytes)
    cache_image_features(policy, [third], feature_cache)
    cache_image_features(policy, [second], feature_cache)
    assert list(feature_cache) == [third.image_digest, second.image_digest]
    for prompt in prompts:
        prompt.features = None
    cache_image_features(policy, prompts, feature_cache)
    assert all(prompt.features is not None for prompt in prompts)
    assert len(feature_cache) == 2


def test_end_tokens_may_be_named_in_any_of_the_configs(tiny_model):
    tokenizer = load_processor(tiny_model, "count").tokenizer
    config = PreTrainedConfig(eos_token_id=7)
    config.text_config = PreTrainedConfig(eos_token_id=[8, 9])
    assert set(stop_tokens({"eos_token_id": 5}, config, tokenizer)) == {5, 7, 8, 9, tokenizer.eos_token_id}


def test_every_end_token_of_the_generation_config_counts(tiny_model):
    """vLLM returns the generation config as a dict; transformers returns it as an object."""
    tokenizer = load_processor(tiny_model, "count").tokenizer
    for config in (GenerationConfig(eos_token_id=[5, 7]), {"eos_token_id": [5, 7]}, {"eos_token_id": 5}):
        want = {5, 7} if not isinstance(config, dict) or isinstance(config["eos_token_id"], list) else {5}
        assert set(stop_tokens(config, PreTrainedConfig(), tokenizer)) == want | {tokenizer.eos_token_id}


def test_a_completion_of_one_token(engine, prompts):
    rollouts = groups_of(engine, prompts, [1, 2, 3], Sampling(2, 1))
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
            check_engine_available(flags, cpu)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('undefined symbol: built for another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("RANK", "LOCAL_RANK", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=r"vLLM did not start .ImportError: undefined symbol.*or use --engine hf"):
        VLLMEngine(flags, tiny_model, processor, torch.bfloat16, RequestLimits(100, 1))
    with pytest.raises(UserError, match="there is no GPU"):
        check_engine_available(flags, cpu)


def test_vllm_is_told_to_keep_the_weights_of_experts_whole(tiny_model, processor, monkeypatch):
    """The kernels that it would choose on newer GPUs rearrange them, and a later push would spoil them."""
    asked: dict = {}
    llm = SimpleNamespace(apply_model=lambda function: None)
    fake = SimpleNamespace(
        LLM=lambda model, **options: asked.update(options) or llm, EngineArgs=SimpleNamespace(__dataclass_fields__={})
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(vllm_start, "extra", lambda name: None)
    for name in ("RANK", "LOCAL_RANK", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")
    limits = RequestLimits(100, 1)
    assert vllm_start.start_vllm(EngineFlags(engine="vllm"), tiny_model, processor, torch.bfloat16, limits, 0) is llm
    assert asked["moe_backend"] == "triton"


def test_auto_says_what_it_chose(capsys):
    assert choose_engine(EngineFlags(), torch.device("cpu")) == "hf"
    assert re.search(r"sampler: transformers \d.* \(there is no GPU\)", capsys.readouterr().err)


def test_pixels_are_compared_picture_by_picture(processor):
    images = [Image.new("RGB", (56, 28 * (1 + i)), (40 * i, 9, 90)) for i in range(3)]
    samples = [make_sample("<image>?", "1", [image], f"row {i}") for i, image in enumerate(images)]
    prompts = encode_prompts(samples, processor)
    received = [prompt.vision["pixel_values"].bfloat16().float() for prompt in reversed(prompts)]
    check_pixels(prompts, received)
    right = received[0].clone()
    received[0].view(-1)[:100] += 0.1  # 0.4% of its pixels, as at sharp edges
    check_pixels(prompts, received)
    spot, hole = right.clone(), right.clone()
    spot.view(-1)[:100] += 0.5
    hole.view(-1)[:100] = math.nan
    for wrong in (right + 0.1, spot, hole):
        received[0] = wrong
        with pytest.raises(UserError, match="row 2: vLLM's vision tower did not get the trainer's pixels"):
            check_pixels(prompts, received)
    with pytest.raises(UserError, match="row 0"):
        check_pixels(prompts, [])


def test_the_pixels_of_each_of_a_prompts_images_are_compared(processor):
    """vLLM's tower gets them image by image, those of other prompts in between."""
    images = [Image.new("RGB", (56, 56 + 28 * i), (80 * i, 9, 90)) for i in range(2)]
    (prompt,) = encode_prompts([make_sample("<image><image>?", "1", images, "row 1")], processor)
    pixels = prompt.vision["pixel_values"].split([16, 24])
    check_pixels([prompt], [pixels[1], torch.zeros(4, 1176), pixels[0]])
    with pytest.raises(UserError, match="row 1"):
        check_pixels([prompt], [pixels[0]])


def test_tokens_that_vllm_expands_otherwise_are_refused(prompts):
    check_expansion(prompts[0], prompts[0].ids.tolist())
    for ids in (prompts[0].ids.tolist()[:-1], [*prompts[0].ids.tolist()[:-1], 3]):
        with pytest.raises(UserError, match="a: vLLM expands the prompt to"):
            check_expansion(prompts[0], ids)


class FakeVLLM:
    """Stands in for `vllm.LLM`: a completion has three tokens or, if its prompt has four, as many as it may."""

    def __init__(self, monkeypatch):
        self.calls, self.renderer, self.prepared = [], self, 0
        self.llm_engine = FakeEngine(monkeypatch, lambda inputs, _: None if len(inputs["prompt_token_ids"]) == 4 else 3)
        self.llm_engine.reset_encoder_cache = lambda: self.calls.append(("encoder",))
        self.model_config = SimpleNamespace(dtype=torch.float32)

    def render_cmpl(self, requests):
        self.prepared += len(requests)
        return [{"type": "token"} | request for request in requests]

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *kwargs.get("tags", ())))


@pytest.fixture
def vllm_engine(processor, monkeypatch):
    """Return an engine of which only `llm` is not real."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.flags, engine.processor, engine.llm = EngineFlags(engine="vllm"), processor, FakeVLLM(monkeypatch)
    engine.vision, engine.hidden_size, engine.stop = processor.family.vision, 64, [3]
    engine.asleep, engine.pixels_checked, engine.sampling_params = False, True, SimpleNamespace
    return engine


def text_prompt(tokens: int, **more) -> Prompt:
    ids = torch.arange(100, 100 + tokens)
    return Prompt(ids, ids.tolist(), ids[None], source=f"row {tokens}", **more)


def test_what_vllm_is_asked_for_and_what_it_returns(vllm_engine):
    prompts = [text_prompt(4, expected_length=5.0), text_prompt(6, expected_length=9.0), text_prompt(5)]
    groups = groups_of(vllm_engine, prompts, [10, 11, 12], Sampling(2, 4, temperature=0.7))
    begun = vllm_engine.llm.llm_engine.begun
    assert [number for number, *_ in begun] == [2, 3, 0, 1, 4, 5], "the longest first"
    assert vllm_engine.llm.prepared == 3 and len({params.seed for *_, params in begun}) == 6
    params = begun[0][-1]
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (4, 0.7, [3])
    for n, group in zip((4, 6, 5), groups):
        for rollout in group:
            assert rollout.ids.tolist() == ([4, 1, 2, 3] if n == 4 else [n, 1, 3])
            assert (rollout.truncated, rollout.finished) == (n == 4, True)
            assert rollout.sampling_logp.tolist() == [-1.0, -2.0, -3.0, -4.0][: len(rollout.ids)]
            text = [4, 1, 2, 3] if n == 4 else [n, 1]  # without the stop token
            assert rollout.text == vllm_engine.processor.tokenizer.decode(text)
    other = replace(prompts[0], ids=prompts[0].ids + 1)
    with pytest.raises(UserError, match="vLLM expands the prompt"):
        groups_of(vllm_engine, [other], [1], Sampling(1, 4))


def test_vllm_continues_completions_within_their_length(vllm_engine):
    old = Rollout(torch.tensor([7, 8]), torch.tensor([-1.0, -2.0]), finished=False)
    done = Rollout(torch.tensor([5, 3]), torch.tensor([-1.0, -1.0]), text="5")
    started, asked = [[done, old], [NOT_STARTED, NOT_STARTED]], []
    prompts = [text_prompt(4), text_prompt(5)]

    def should_stop(over):
        asked.append(set(over))
        return len(over) == 3

    groups = groups_of(vllm_engine, prompts, [10, 11], Sampling(2, 6), started=started, should_stop=should_stop)
    assert asked == [set(), {0, 1, 2}]
    begun = vllm_engine.llm.llm_engine.begun
    want = [[100, 101, 102, 103, 7, 8], *[prompts[1].engine_ids] * 2]
    assert [inputs["prompt_token_ids"] for _, inputs, _ in begun] == want
    assert vllm_engine.llm.prepared == 2, "each prompt once"
    assert [params.max_tokens for *_, params in begun] == [4, 6, 6], "the tokens so far count"
    first, ended = groups[0]
    assert first is done
    assert (ended.ids.tolist(), ended.sampling_logp.tolist()) == ([7, 8, 6, 1, 3], [-1, -2, -1, -2, -3])
    assert (ended.finished, ended.truncated) == (True, False)
    assert ended.text == vllm_engine.processor.tokenizer.decode([7, 8, 6, 1])
    groups = groups_of(vllm_engine, prompts, [10, 11], Sampling(2, 6), started=started, should_stop=lambda over: True)
    assert groups[0][0] is done and groups[0][1].ids.tolist() == [7, 8]
    assert [(len(each.ids), each.finished, each.text) for each in groups[1]] == [(0, False, "")] * 2


def test_a_text_begins_with_what_its_prompt_has_opened(vllm_engine, engine):
    openings = ["<think>\n", "", "<answer>"]
    opened = [text_prompt(4 + i, opening=opening, expected_length=i) for i, opening in enumerate(openings)]
    plain = [replace(prompt, opening="") for prompt in opened]
    for sampler in (vllm_engine, engine):
        groups = zip(openings, *(groups_of(sampler, each, [1, 2, 3], Sampling(2, 4)) for each in (opened, plain)))
        for opening, with_it, without in groups:
            assert [r.text for r in with_it] == [opening + r.text for r in without]


def test_the_ranks_of_an_engine_get_the_completions_of_their_own_prompts(vllm_engine, monkeypatch):
    vllm_engine.flags, vllm_engine.group = EngineFlags(engine="vllm", tensor_parallel=2), None
    shares = [[Request(text_prompt(n), NOT_STARTED.ids, 10 + n, 0, 3) for n in lengths] for lengths in ((5,), (6, 7))]
    gather = lambda out, own, group: out.__setitem__(slice(None), shares)  # noqa: E731
    monkeypatch.setattr("sampling.vllm_engine.dist.all_gather_object", gather)
    for rank, requests in enumerate(shares):
        monkeypatch.setattr("sampling.vllm_engine.dist.get_rank", lambda group, rank=rank: rank)
        outputs = vllm_engine.generate(requests, Sampling(1, 3))
        assert [output.ids.tolist() for output in outputs] == [[len(each.prompt.ids), 1, 3] for each in requests]


def test_the_ranks_of_an_engine_send_each_other_what_vllm_needs(vllm_engine, prompts):
    """Pixels are most of a request's bytes, and are needed only until they are compared with vLLM's, if at all."""
    with_features = replace(prompts[0], features=torch.zeros(9, 128), for_teacher=prompts[1])
    sent = vllm_engine._for_others(with_features)
    assert sent.vision.keys() == {"image_grid_thw"} and sent.features is with_features.features
    assert sent.for_teacher is None and with_features.for_teacher and "pixel_values" in with_features.vision
    for checked in (False, True):
        vllm_engine.pixels_checked = checked
        sent = vllm_engine._for_others(replace(prompts[0], features=None))
        assert ("pixel_values" in sent.vision) != checked and sent.images
        assert vllm_engine._request(sent) == vllm_engine._request(replace(prompts[0], features=None))


def test_vllm_gets_features_only_if_it_accepts_them(vllm_engine, prompts):
    """Those of inner layers reach it later, in `with_features`."""
    with_features = replace(prompts[0], features=torch.zeros(9, 128))
    for prompt, accepts, sent in (
        (prompts[1], True, None),
        (replace(prompts[0], features=None), True, "images"),
        (with_features, True, "features"),
        (with_features, False, "images"),
    ):
        vllm_engine.vision = replace(vllm_engine.vision, vllm_features=accepts)
        data = vllm_engine._request(prompt).get("multi_modal_data", {}).get("image")
        assert {type(None): None, list: "images", dict: "features"}[type(data)] == sent
        assert sent != "features" or data["image_embeds"].shape == (9, 64)


def test_what_vllm_computed_with_old_weights_is_discarded(vllm_engine, tiny_model):
    """After a sleep, the KV cache gets its memory back once the weights are there."""
    policy = load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))
    vllm_engine.sync_weights(policy)
    vllm_engine.sleep()
    vllm_engine.wake_up()
    vllm_engine.sync_weights(policy)
    synced, caches = ("apply_model",), [("reset_prefix_cache",), ("encoder",)]
    calls = [synced, *caches, ("sleep",), ("wake_up", "weights"), synced, ("wake_up", "kv_cache"), *caches]
    assert vllm_engine.llm.calls == calls
    assert not vllm_engine.asleep


def test_a_sampler_that_fits_beside_the_trainer_stays_awake(vllm_engine, tiny_model):
    policy = load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))
    vllm_engine.stays_awake = True
    for _ in range(2):
        vllm_engine.sleep()
        vllm_engine.wake_up()
        vllm_engine.sync_weights(policy)
    assert vllm_engine.llm.calls == [("apply_model",), ("reset_prefix_cache",), ("encoder",)] * 2


def test_an_engine_needs_all_its_ranks(monkeypatch):
    monkeypatch.setattr("rollout.distributed.world_size", lambda: 6)
    with pytest.raises(UserError, match=r"--tensor_parallel 4 must divide the number of processes \(6\)"):
        check_engine_available(EngineFlags(tensor_parallel=4), torch.device("cpu"))


def test_without_room_for_a_copy_the_policy_samples(capsys):
    assert choose_engine(EngineFlags(), torch.device("cpu"), has_room=False) == "policy"
    assert "no memory for a copy; sampling is slow" in capsys.readouterr().err


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
    flags = dict(
        model=tiny_model,
        adapter=f"{tmp_path}/run/final",
        data=shapes,
        task="count",
        limit=2,
        max_completion_length=8,
        n=2,
    )
    evaluate.main(evaluate.Config(**flags, load_in_4bit=True, temperature=1.0, output=f"{tmp_path}/eval"))
    assert len(read_jsonl(tmp_path / "eval" / "predictions.jsonl")) == 2


def test_sampling_that_runs_out_of_memory_continues_with_smaller_batches(engine, prompts, monkeypatch, capsys):
    want = groups_of(engine, prompts, [1, 2, 3], Sampling(2, 5))
    decode, sizes, room = HFEngine._decode, [], [1]

    def small_gpu(self, some, *args):
        sizes.append(len(some))
        if len(some) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return decode(self, some, *args)

    monkeypatch.setattr(HFEngine, "_decode", small_gpu)
    monkeypatch.setattr(engine, "max_sequences", 512)
    got = groups_of(engine, prompts, [1, 2, 3], Sampling(2, 5))
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    assert [r.ids.tolist() for group in got for r in group] == [r.ids.tolist() for group in want for r in group]
    assert "sampling at most 3 sequences at once" in capsys.readouterr().err
    room[0] = 0
    with pytest.raises(RunStopped, match=r"out of GPU memory in sampling\. What helps: a smaller --max_completion"):
        groups_of(engine, prompts, [1, 2, 3], Sampling(4, 5))


def test_where_the_policy_cannot_sample_is_said(tiny_model, monkeypatch):
    flags, cpu = EngineFlags(engine="policy"), torch.device("cpu")
    assert choose_engine(flags, cpu) == "policy"
    monkeypatch.setattr("rollout.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="--engine policy works in one process only"):
        check_engine_available(flags, cpu)
    with pytest.raises(ValueError, match="engine policy is for training"):
        evaluate.Config(model=tiny_model, data="rows", engine="policy")
    with pytest.raises(ValueError, match="load_in_4bit needs an adapter"):
        evaluate.Config(model=tiny_model, data="rows", load_in_4bit=True)
    with pytest.raises(ValueError, match="baseline must be the output of an evaluation"):
        evaluate.Config(model=tiny_model, adapter="a", baseline=tiny_model, data="rows", load_in_4bit=True)


def test_an_own_engine_is_one_entry(tiny_model, shapes, tmp_path, monkeypatch, capsys):
    """It is chosen and named by the run, is not given memory for a copy, and "auto" never takes it."""
    made = []

    def make(flags, model, processor, device, dtype, limits, policy):
        made.append((flags.engine, limits.tokens, policy is not None))
        return HFEngine(load_model(model, dtype).to(device).eval(), processor.tokenizer)

    monkeypatch.setitem(ENGINES, "remote", EngineEntry(make, "server of mine", needs_copy=False))
    shares = []
    monkeypatch.setattr(Plan, "check", lambda planned, needs_copy: shares.append(needs_copy * planned.vllm_memory))
    flags = dict(max_steps=1, max_prompt_length=200)
    grpo.main(runs.config(tiny_model, shapes, tmp_path / "own", engine="remote", **flags))
    assert made == [("remote", 212, True)] and shares == [0.0]
    assert capsys.readouterr().err.count("sampler: server of mine\n") == 1
    grpo.main(runs.config(tiny_model, shapes, tmp_path / "auto", **flags))
    assert len(made) == 1 and shares == [0.0, 0.25]
    assert runs.metrics(tmp_path / "own") == runs.metrics(tmp_path / "auto")
    evaluation = dict(
        model=tiny_model, data=shapes, task="count", limit=2, max_completion_length=4, output=f"{tmp_path}/evaluated"
    )
    evaluate.main(evaluate.Config(**evaluation, engine="remote"))
    assert made[1:] == [("remote", 2052, False)]


def test_an_unknown_engine_is_refused_before_a_model_is_loaded(tiny_model, shapes, tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "remote", EngineEntry(print, "server", "no_such", "pip install x"))
    refusal = r"^--engine remot: choose one of vllm, hf, policy, remote, or add one with --plugin FILE$"
    with pytest.raises(UserError, match=refusal):
        grpo.main(runs.config(tiny_model, shapes, tmp_path, engine="remot"))
    with pytest.raises(UserError, match=refusal):
        evaluate.main(evaluate.Config(model=tiny_model, data=shapes, engine="remot", output=str(tmp_path)))
    with pytest.raises(UserError, match=r"^--engine remote: server is not installed; run pip install x or use"):
        check_engine_available(EngineFlags(engine="remote"), torch.device("cpu"))


def test_what_vllm_changes_in_the_process_is_undone(tiny_model, monkeypatch):
    """vLLM sets the compiler's environment variables, and registers configuration classes of its own."""

    class VLLMConfig(Qwen2_5_VLConfig):
        pass

    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with undo_global_changes(load_config(tiny_model)):
        monkeypatch.setenv("TRITON_CACHE_DIR", "/vllm")
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        AutoConfig.register("qwen2_5_vl", VLLMConfig, exist_ok=True)
        assert type(load_config(tiny_model)) is VLLMConfig
    assert type(load_config(tiny_model)) is Qwen2_5_VLConfig
    assert os.environ["TRITON_CACHE_DIR"] == "/before"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
