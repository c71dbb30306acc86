"""Choices that depend on GPU memory. The choices are plain arithmetic, so these tests need no GPU."""

import contextlib
import functools
import math
import weakref
from dataclasses import replace

import pytest
import torch

from common import distributed
from common.errors import RunStopped, UserError
from config import Config, PolicyFlags
from policy import memory
from policy import sharding as sharding_module
from policy.batches import micro_batches
from policy.families import language_model
from policy.memory import GIB, GPUs, Plan
from policy.model import empty_policy, load_config, load_policy, num_weights, vision_parameters
from policy.sharding import apply_fsdp, reduce_gradients, take_gradients, unsharded
from tests.helpers.models import make_group, save_tiny

CPU = torch.device("cpu")
USABLE = 1 - memory.MARGIN


def make_config(**flags) -> Config:
    return Config(data="rows", **dict(max_prompt_length=1000, max_completion_length=1000, prompts_per_step=32) | flags)


def plan(policy, usable: float = 1e12, number: int = 1, per_machine: int = 8, others: float = 0.0, **flags) -> Plan:
    """Plan a run on GPUs of whose memory the allocator can use `usable` bytes."""
    return memory.plan(policy, make_config(**flags), GPUs(usable / USABLE, number, per_machine, others))


def choose_size(policy, reference=None, **flags) -> int:
    return memory.choose_micro_batch_size(policy, [reference] if reference else [], plan(policy, **flags))


@pytest.fixture
def policy(tiny_model):
    return load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))


@pytest.fixture(autouse=True)
def nothing_reserved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


def set_free_memory(monkeypatch, policy, num_checkpointed: int, tokens: int, compiled: bool = True) -> None:
    """Simulate a GPU that just fits micro-batches of `tokens` tokens if `num_checkpointed` layers are checkpointed."""
    fixed = 12 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    text = language_model(policy.model)
    fixed += 12 * memory.LOGIT_ROWS * len(text.embed_tokens.weight) + 12 * sum(
        p.numel() for p in text.layers[0].parameters()
    )
    head = policy.model.lm_head.weight
    fixed += 2 * sum(p.numel() for p in {text.embed_tokens.weight, head}) + 2 * 2 * head.numel()
    total = 2**34
    free = fixed + memory.MARGIN * total + (tokens + 0.5) * memory.bytes_per_token(policy, num_checkpointed, compiled)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def checkpointed(policy) -> list[bool]:
    return [layer.gradient_checkpointing for layer in language_model(policy.model).layers]


@pytest.mark.parametrize(
    ("num_checkpointed", "tokens", "want", "want_tokens"),
    [
        (0, 50_000, [False] * 4, memory.MAX_MICRO_BATCH_TOKENS),  # more free memory than is useful
        (0, 9_000, [False] * 4, 9_000),
        (1, 9_000, [False, False, False, True], 9_000),
        (2, 9_000, [False, True] * 2, 9_000),
        (4, 9_000, [True] * 4, 9_000),
        (4, 3_000, [True] * 4, 3_000),  # below the target, but enough for the longest row
    ],
)
def test_as_few_layers_are_checkpointed_as_fit(policy, monkeypatch, num_checkpointed, tokens, want, want_tokens):
    set_free_memory(monkeypatch, policy, num_checkpointed, tokens)
    assert choose_size(policy) == want_tokens
    assert checkpointed(policy) == want
    assert policy.model.is_gradient_checkpointing == (num_checkpointed > 0), (
        "this attribute decides whether derivatives are kept"
    )


def test_a_large_requested_micro_batch_is_checkpointed(policy, monkeypatch):
    set_free_memory(monkeypatch, policy, 2, 20_000)
    assert choose_size(policy, micro_batch_tokens=20_000) == 20_000
    assert checkpointed(policy) == [False, True] * 2


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        (9_000, False),  # micro-batches fill the memory, but passes without gradients need little memory
        (50_000, True),
    ],
)
def test_weights_are_gathered_once_where_they_fit(tiny_model, policy, monkeypatch, tokens, want):
    distributed.start()
    set_free_memory(monkeypatch, policy, 0, tokens)
    cpu = torch.device("cpu")
    policy, reference = (
        apply_fsdp(p, cpu, torch.float32) for p in (policy, load_policy(tiny_model, PolicyFlags(), cpu))
    )
    choose_size(policy, reference)
    assert (policy.keep_unsharded, reference.keep_unsharded) == (want, True)
    choose_size(policy, reference, offload=("reference",), beta=0.01)
    assert (policy.keep_unsharded, reference.keep_unsharded) == (want, False)


def test_gpus_with_different_free_memory_get_the_same_micro_batches(policy, monkeypatch):
    """The GPU with less memory decides for both."""
    distributed.start()
    policy = apply_fsdp(policy, torch.device("cpu"), torch.float32)
    sent, choices = [], []
    monkeypatch.setattr(distributed, "all_max", lambda value: sent.append(value) or value)
    for checkpointed_layers, tokens in ((2, 9_000), (0, 50_000)):
        set_free_memory(monkeypatch, policy, checkpointed_layers, tokens)
        size = choose_size(policy)
        choices.append((size, checkpointed(policy), policy.keep_unsharded))
        small = sent[:]
        monkeypatch.setattr(distributed, "all_max", lambda value, small=small: torch.maximum(value, small.pop(0)))
    assert choices == [(9_000, [False, True] * 2, False)] * 2


def test_what_the_first_update_allocates(tiny_model, policy):
    """Gradients and moments of the parameters of a shard; only a trained lm_head has gradients of its logits."""
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    for flags, sharding, want in (({}, "full", 3), ({}, "none", 12), ({"offload": ("optimizer",)}, "full", 1)):
        planned = plan(policy, number=4, sharding=sharding, **flags)
        assert planned.moments + planned.gradients == want * trained, (flags, sharding)
    adapted = load_policy(tiny_model, PolicyFlags(lora_rank=4), CPU)
    head, text = policy.model.lm_head.weight.numel(), language_model(policy.model)
    adapter = sum(p.numel() for p in language_model(adapted.model).layers[0].parameters() if p.requires_grad)
    layer = sum(p.numel() for p in text.layers[0].parameters())
    root = sum(p.numel() for p in {text.embed_tokens.weight, policy.model.lm_head.weight})
    assert plan(policy).gathered == 2 * 6 * layer + 2 * root + 2 * 2 * head
    assert plan(adapted, lora_rank=4).gathered == 2 * 6 * (layer + adapter) + 2 * root


def test_float32_and_a_trained_tower_take_more(tiny_model, policy):
    assert memory.bytes_per_token(policy, 0, True, torch.float32) > 1.9 * memory.bytes_per_token(policy, 0, True)
    tower = load_policy(tiny_model, PolicyFlags(train_vision=True), torch.device("cpu"))
    cost = [memory.bytes_per_token(p, num_checkpointed, True) for p in (policy, tower) for num_checkpointed in (0, 4)]
    assert cost[2] - cost[0] > cost[3] - cost[1] > 0, "checkpointing must also reduce the cost of the tower's blocks"


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 4}, {"lora_rank": 4, "lora_experts": True}])
def test_experts_keep_as_much_as_planned(tmp_path, flags):
    """Frozen experts do not keep what they see. Uncompiled, experts keep at most as much as planned, and 0.6 of it."""
    policy = load_policy(save_tiny("qwen3_vl_moe", tmp_path), PolicyFlags(**flags), CPU)
    text, tokens, kept = language_model(policy.model), 512, {}
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        text.layers[0].mlp(torch.randn(1, tokens, text.config.hidden_size, requires_grad=True))
    one, two = (memory.bytes_per_token(policy, n, False, torch.float32) for n in (1, 2))
    layer_input = 4 * text.config.hidden_size
    others = 1.5 * 9 * 4 * text.config.hidden_size  # norms and attention
    planned = one - two + layer_input - others
    assert 0.6 < sum(storage.nbytes() for storage in kept.values()) / tokens / planned < 1


def test_a_reference_in_float32_takes_twice_as_much(policy):
    plans = [plan(policy, dtype=dtype, beta=0.01) for dtype in ("bfloat16", "float32")]
    weights, tower = (
        sum(p.numel() for p in part) for part in (policy.parameters(), memory.vision_parameters(policy.model))
    )
    assert [planned.reference for planned in plans] == [2 * (weights - tower), 4 * (weights - tower)]
    assert plans[1].weights - plans[0].weights == 2 * tower, "the reference shares the policy's frozen tower"


def test_the_training_state_by_hand(tiny_model, policy):
    """Bytes of a parameter in bfloat16: 2 if it is frozen, otherwise 4 + 8 for its moments, and 4 for its gradient."""
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
    assert frozen and trained
    for flags, weights in (
        ({}, 2 * frozen + 12 * trained),
        ({"beta": 0.01}, 2 * frozen + 14 * trained),
        ({"beta": 0.01, "offload": ("reference",)}, 2 * frozen + 12 * trained),
        ({"offload": ("optimizer",)}, 2 * frozen + 4 * trained),
    ):
        planned = plan(policy, **flags)
        assert (planned.resting, planned.gradients) == (weights, 4 * trained), flags
    flags = dict(lora_rank=4, load_in_4bit=True, dtype="bfloat16")
    four_bit = load_policy(tiny_model, PolicyFlags(**flags), CPU)
    trained = sum(p.numel() for p in four_bit.parameters() if p.requires_grad)
    frozen = sum(p.numel() * min(p.element_size(), 2) for p in four_bit.parameters() if not p.requires_grad)
    planned = plan(four_bit, beta=0.01, **flags)
    assert (planned.resting, planned.gradients) == (frozen + 12 * trained, 4 * trained)


@pytest.mark.parametrize(
    "flags", [{}, {"train_vision": True}, {"lora_rank": 4}, {"lora_rank": 4, "load_in_4bit": True}]
)
def test_a_plan_without_weights_is_that_of_the_loaded_model(tiny_model, flags):
    flags |= {"dtype": "bfloat16", "beta": 0.01}
    cfg, gpus = make_config(**flags), GPUs(2**30, 4)
    loaded = memory.plan(load_policy(tiny_model, cfg, CPU), cfg, gpus)
    assert memory.plan(empty_policy(load_config(tiny_model), cfg), cfg, gpus) == loaded


def test_the_peak_is_the_sum_of_what_is_there_at_a_time(policy):
    """Half of 100 GiB beside the sampler are enough for it to stay awake; what it leaves of 6 GiB is not."""
    fits = pytest.importorskip("apps.fits", reason="needs apps/, which is not here")
    planned = plan(policy, 100 * GIB, vllm_memory=0.5, beta=0.01)
    held = planned.resting + planned.gradients + planned.logits + planned.gathered + planned.unsharded
    activations = memory.MAX_MICRO_BATCH_TOKENS * planned.token_bytes[0]
    small = plan(policy, 6 * GIB, vllm_memory=0.95, beta=0.01)
    awake, asleep = (fits.estimate(each, needs_copy=True) for each in (planned, small))
    assert awake["peak"] == pytest.approx(memory.CUDA_GIB + 50 + (held + activations) / GIB, abs=0.1)
    assert asleep["peak"] == pytest.approx(memory.CUDA_GIB + 0.95 * 6 + planned.resting / GIB, abs=0.1)


def test_a_copy_for_the_sampler_must_fit_beside_the_trainer(policy):
    needed = 2 * sum(p.numel() for p in policy.parameters()) + memory.SAMPLER_BYTES
    resting, gradients = plan(policy).resting, plan(policy).gradients
    for usable, others, has_room, fraction in (
        (resting + needed - 1, 0, False, pytest.approx(0.9, abs=0.1)),
        (resting + needed + 1, 0, True, pytest.approx(0.9, abs=0.1)),
        (2 * needed, 0, True, pytest.approx(0.5)),
        (2 * needed, needed, False, pytest.approx(0.5)),  # of another program
        (100 * needed, 0, True, 0.25),
    ):
        planned = plan(policy, usable, others=others, vllm_memory=0.25)
        assert (planned.has_room, planned.vllm_memory) == (has_room, fraction)
    for usable, has_room in ((resting + gradients + needed - 1, False), (resting + gradients + needed + 1, True)):
        limited = plan(policy, usable, others=needed, vllm_memory=0.25, gpu_memory=100.0)
        assert limited.has_room == has_room, "of its own memory, during updates too"
    assert plan(policy, needed, number=2, vllm_memory=0.25).has_room, "several processes need copies"


@pytest.mark.parametrize(
    ("flags", "processes", "sequences"),
    [
        ({}, 1, 256),
        ({}, 4, 64),
        ({"tensor_parallel": 2}, 4, 128),
        ({"prompts_per_step": 33}, 1, 256),
        ({"prompts_per_step": 33, "vllm_sequences": 512}, 1, 264),
        ({"prompts_per_step": 16, "oversample": 1.5, "max_staleness": 2}, 1, 192),
    ],
)
def test_by_default_vllm_gets_what_the_completions_of_a_step_need(policy, monkeypatch, flags, processes, sequences):
    """A token of the tiny model has a key and a value of 32 numbers in each of 2 heads and 4 layers, 2 bytes each."""
    flags = dict(max_completion_length=900, max_prompt_length=800, number=processes) | flags
    parallel = flags.get("tensor_parallel", 1)
    copy = 2 * sum(p.numel() for p in policy.parameters()) / parallel
    cache = sequences * (900 + 800 / 8) * 2 * 32 * 2 * 4 * 2 / parallel
    enough, resting = copy + memory.VLLM_BYTES + cache, plan(policy, **flags).resting
    for usable, others, given in (
        (2 * enough, 0, enough),
        (8 * enough, 0, 2 * enough),  # a quarter
        (1.2 * enough, 0, memory.VLLM_SHARE * (1.2 * enough - resting)),  # as far as the trainer leaves it free
        (2 * enough, enough, memory.VLLM_SHARE * (enough - resting)),  # another program has the rest
    ):
        planned = plan(policy, usable, others=others, **flags)
        assert (planned.has_room, planned.vllm_memory) == (True, pytest.approx(given / usable))
        assert plan(policy, usable, others=others, vllm_memory=0.6, **flags).vllm_memory == pytest.approx(0.6)
        limited = plan(policy, usable, others=others, gpu_memory=1000.0, **flags)
        assert limited.vllm_memory == pytest.approx(max(0.25, (copy + memory.SAMPLER_BYTES) / usable))


def test_a_head_that_cannot_be_divided_is_on_every_gpu_of_an_engine(policy):
    sizes = [plan(policy, number=8, tensor_parallel=n).cache for n in (1, 2, 8)]
    assert sizes == [sizes[0], sizes[0], 4 * sizes[0]], "as many heads, half and half; for as many more completions"


def test_states_of_linear_attention_need_no_cache(policy, monkeypatch):
    text, whole = policy.model.config.get_text_config(), plan(policy).cache
    for name in ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"):
        monkeypatch.setattr(text, name, 1, raising=False)
    monkeypatch.setattr(text, "layer_types", ["linear_attention", "full_attention"] * 2)
    assert plan(policy).cache == whole / 2


@pytest.mark.parametrize("four_bit", [False, True])
def test_a_shard_and_the_whole_tower_must_fit(tiny_model, four_bit):
    """On four processes. Of a 4-bit model, only the adapter is sharded."""
    flags = dict(dtype="bfloat16", **({"lora_rank": 4, "load_in_4bit": True} if four_bit else {}))
    policy = load_policy(tiny_model, PolicyFlags(**flags), CPU)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    whole = [p for p in policy.parameters() if not p.requires_grad]
    assert four_bit or len(whole) == len(memory.vision_parameters(policy.model))
    needed = 16 * trained / 4 + sum(min(p.element_size(), 2) * p.numel() for p in whole)
    for usable in (needed + 1, needed - 1):
        with pytest.raises(UserError, match="too small") if usable < needed else contextlib.nullcontext():
            plan(policy, usable, number=4, sharding="full", **flags).check(needs_copy=False)


def test_the_allocator_keeps_to_the_limit(monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: fractions.append(args))
    monkeypatch.setattr(distributed, "memory_fraction", lambda gib: gib / 100)
    for device in (memory.CUDA, CPU):
        memory.limit_allocator(10.0, device)
    assert fractions == [((10 - memory.CUDA_GIB) / 100, memory.CUDA)]


@pytest.mark.parametrize(
    ("flags", "vllm_memory", "message"),
    [
        ({}, 0.2, r"weights, gradients and AdamW take .* --lora_rank 64, --load_in_4bit with it, --offload optimizer,"),
        ({"lora_rank": 4}, 0.2, r"What helps: --load_in_4bit, --offload optimizer, more GPUs$"),
        ({"lora_rank": 4}, 0.9, r"weights, AdamW and --vllm_memory take .*: --load_in_4bit, --offload optimizer, more"),
    ],
)
def test_a_gpu_too_small_for_the_weights_says_what_helps(tiny_model, flags, vllm_memory, message, monkeypatch):
    policy = load_policy(tiny_model, PolicyFlags(**flags), CPU)
    monkeypatch.setattr(memory.Plan, "vllm_memory", vllm_memory)
    planned = plan(policy, 2 * 2**20, beta=0.01, **flags)
    with pytest.raises(UserError, match=message):
        planned.check(needs_copy=True)
    replace(planned, gpus=GPUs(2 * 2**20, device=CPU)).check(needs_copy=True)


def test_a_gpu_too_small_for_the_sampler_says_what_helps(policy):
    """Another share of vLLM helps only if it would not be raised again to what vLLM needs to start."""
    hints, planned = [], replace(plan(policy, 2**32), weights=0.5 * 2**32, moments=0, gradients=0)
    least = (planned.sampler_weights + memory.SAMPLER_BYTES) / 2**32
    for fraction, processes in ((least, 1), (least, 4), (0.9, 1), (0.9, 4)):
        with pytest.raises(UserError, match="--vllm_memory take") as error:
            gpus = replace(planned.gpus, number=processes)
            flags = replace(planned.cfg, vllm_memory=fraction)
            replace(planned, gpus=gpus, cfg=flags, sharding="full").check(needs_copy=True)
        hints.append(str(error.value).split("What helps: ")[1].split(", --lora")[0])
    below = "a --vllm_memory below 0.90"
    assert hints[0].startswith("--lora_rank") and hints[1:] == ["a larger --tensor_parallel", below, below]


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "fraction", "want"),
    [
        (1, 1, 9.0, "full"),  # with one process, "full" means a whole copy
        (4, 4, 0.3, "none"),
        (4, 4, 0.4, "full"),
        (16, 8, 0.3, "none"),
        (16, 8, 5.0, "hybrid"),  # the state fits into two thirds of the memory of eight GPUs
        (16, 8, 6.0, "full"),
    ],
)
def test_weights_are_sharded_where_they_take_much_of_a_gpu(
    policy, monkeypatch, world_size, local_world_size, fraction, want
):
    """`fraction` is the memory for weights, gradients and optimizer state, divided by the memory of one GPU."""
    whole = plan(policy, beta=0.01)
    state = whole.resting + whole.gradients
    assert state > 18 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    machines = dict(usable=state / fraction, number=world_size, per_machine=local_world_size, beta=0.01)
    planned = plan(policy, **machines)
    assert planned.sharding == want
    assert planned.shards == {"none": 1, "hybrid": local_world_size, "full": world_size}[want]
    assert plan(policy, sharding="none", **machines).sharding == "none"


@pytest.mark.parametrize("local_world_size", [8, 4])
def test_hybrid_over_unequal_machines_is_refused_and_never_chosen(policy, monkeypatch, local_world_size):
    whole = plan(policy, beta=0.01)
    monkeypatch.setattr(distributed, "world_size", lambda: 12)
    monkeypatch.setattr(distributed, "local_world_size", lambda: local_world_size)
    monkeypatch.setattr(
        distributed, "all_gather", lambda value: [8] * 8 + [4] * 4 if value == local_world_size else [value]
    )
    here = memory.gpus_here(CPU)
    gpus = replace(here, size=(whole.resting + whole.gradients) / 2 / USABLE, device=memory.CUDA)
    assert memory.plan(policy, make_config(beta=0.01), gpus).sharding == "full"
    with pytest.raises(UserError, match="the same number of processes on every machine"):
        memory.plan(policy, make_config(sharding="hybrid"), gpus)


@pytest.mark.parametrize("limiting", ["limit", "other programs"])
def test_a_limited_gpu_is_filled_like_a_smaller_one(policy, monkeypatch, limiting):
    """What other programs use counts only if they leave less than the limit."""
    set_free_memory(monkeypatch, policy, 2, 9_000)
    free, total = torch.cuda.mem_get_info(memory.CUDA)
    needed, limit = free - memory.MARGIN * total, 12 * 2**30
    own = limit * (1 - memory.MARGIN) - needed
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own - memory.CUDA_GIB * 2**30)
    left = total - own if limiting == "limit" else limit - own
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left, total))
    gib = 12.0 if limiting == "limit" else 14.0
    assert choose_size(policy, gpu_memory=gib) == pytest.approx(9_000, 1)
    assert checkpointed(policy) == [False, True] * 2


def test_the_sampler_stays_awake_where_the_largest_micro_batch_fits_beside_it(policy, monkeypatch):
    total, planned = 2**36, plan(policy, 2**36 * USABLE)
    needed = planned.resting + planned.gradients + 2 * sum(p.numel() for p in policy.parameters())
    needed += 12 * memory.LOGIT_ROWS * 264 + memory.MAX_MICRO_BATCH_TOKENS * memory.bytes_per_token(policy, 0, True)
    needed += memory.MARGIN * total
    for free, flags, stays in (
        (needed + 1, {}, True),
        (needed - 1, {}, False),
        (needed - 1, {"micro_batch_tokens": 1000}, True),
        (needed - 1, {"gpu_memory": 20.0}, True),  # PyTorch would count what a sleeping vLLM has given back
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        changed = plan(policy, total * USABLE, **flags)
        assert memory.sampler_stays_awake(changed) == stays, (free, flags)
        assert not memory.sampler_stays_awake(replace(changed, gpus=replace(changed.gpus, device=CPU)))
    small = plan(policy, total * USABLE, micro_batch_tokens=1)
    monkeypatch.setattr(distributed, "all_max", lambda value: torch.tensor(1))
    assert not memory.sampler_stays_awake(small), "all of them or none"


def test_what_this_process_uses_is_not_that_of_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**34, 2**36))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**33)
    others = 2**36 - 2**34 - 2**33 - memory.CUDA_GIB * GIB
    assert memory.gpus_here(memory.CUDA) == GPUs(2**36, 1, 1, others)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**36)
    assert memory.used_by_others(memory.CUDA) == 0, "vLLM's memory is counted as reserved while it sleeps"
    assert memory.gpus_here(CPU) == GPUs(math.inf, 1, 1, 0.0, device=CPU)


def test_messages_name_what_other_programs_use(policy, monkeypatch):
    """A GPU of 40 GiB of which others use 39.5; without them, the training state would fit."""
    plan(policy, 40 * GIB, vllm_memory=0.1).check(needs_copy=True)
    shared = plan(policy, 40 * GIB, others=39.5 * GIB, vllm_memory=0.1)
    with pytest.raises(UserError, match=r"too small by .* usable; other programs use 39.5 GiB of this GPU. What helps"):
        shared.check(needs_copy=True)
    set_free_memory(monkeypatch, policy, 4, 1000)
    with pytest.raises(UserError, match=r"of 2000 tokens; other programs use 39.5 GiB of this GPU. What helps"):
        memory.choose_micro_batch_size(policy, [], shared)


def test_a_limited_run_keeps_the_samplers_memory_during_updates(policy, monkeypatch):
    planned = plan(policy)
    usable = 2 * (planned.resting + planned.gradients) - 1
    fitting = plan(policy, usable)
    monkeypatch.setattr(memory.Plan, "vllm_memory", 0.5)
    fitting.check(needs_copy=True)
    monkeypatch.setattr(memory.Plan, "vllm_memory", 0.51)
    with pytest.raises(UserError, match="weights, AdamW and --vllm_memory take"):
        replace(fitting, cfg=make_config(gpu_memory=1.0)).check(needs_copy=True)


def test_explicit_flags_override_the_choice(policy, monkeypatch):
    set_free_memory(monkeypatch, policy, 0, 50_000)
    assert choose_size(policy, micro_batch_tokens=777, activation_checkpointing="full") == 777
    assert checkpointed(policy) == [True] * 4


def test_without_a_gpu_memory_limits_nothing(policy):
    for flags, size in (({}, memory.CPU_MICRO_BATCH_TOKENS), ({"micro_batch_tokens": 777}, 777)):
        planned = memory.plan(policy, make_config(**flags), memory.gpus_here(CPU))
        planned.check(needs_copy=True)
        assert (planned.sharding, planned.has_room, planned.vllm_memory) == ("full", True, 0.25)
        assert memory.choose_micro_batch_size(policy, [], planned) == size
        assert checkpointed(policy) == [False] * 4


def test_a_row_that_cannot_fit_reports_the_missing_memory(policy, monkeypatch):
    set_free_memory(monkeypatch, policy, 4, 1000)
    with pytest.raises(UserError, match=r"too small by 0\.\d GiB for a prompt and completion of 2000 tokens.*--max_p"):
        choose_size(policy)


@pytest.mark.parametrize(
    "flags", [{}, {"train_vision": True}, {"lora_rank": 4}, {"load_in_4bit": True, "lora_rank": 4}]
)
def test_no_full_layer_stays_alive_after_sharding(flags, tiny_model, monkeypatch):
    """FSDP moves each full layer to the device and keeps only the local shard. If full layers stayed alive, they would
    fill the device's memory."""
    device, flags = distributed.start(), PolicyFlags(**flags)
    policy = load_policy(tiny_model, flags, device)
    ignored = "model" if flags.load_in_4bit else ".visual."
    parameters = policy.named_parameters()
    sharded = {name: weakref.ref(p) for name, p in parameters if p.requires_grad or ignored not in name}
    fully_shard, alive = sharding_module.fully_shard, []

    def fully_shard_and_record(module, **options):
        fully_shard(module, **options)
        alive.append([name for name, parameter in sharded.items() if parameter() is not None])

    monkeypatch.setattr(sharding_module, "fully_shard", fully_shard_and_record)
    apply_fsdp(policy, device, torch.float32)
    assert len(alive) >= 5 and len(alive[0]) > len(alive[1]) > 0
    assert alive[-1] == []


def test_an_overflow_beside_other_processes_stops_at_once(monkeypatch, policy):
    """They wait in the middle of the same work, so a second attempt would never end."""
    calls = []

    def overflow(budget: int) -> None:
        calls.append(budget)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(RunStopped, match="out of GPU memory"):
        memory.with_oom_retry(policy, 100, overflow)
    assert calls == [100]


def test_an_overflow_while_the_first_one_is_cleared_up_stops_with_advice(monkeypatch, policy):
    def overflow(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    monkeypatch.setattr(memory, "recover", overflow)
    with pytest.raises(RunStopped, match=r"out of GPU memory .*--activation_checkpointing full"):
        memory.with_oom_retry(policy, 100, overflow)


def test_the_budget_shrinks_by_a_quarter_three_times(monkeypatch, policy, capsys):
    """Work that fits into 43 tokens succeeds with 42. Work that needs a fourth reduction stops the run."""
    budgets = []

    def work(budget: int, fitting: int) -> str:
        budgets.append(budget)
        if budget > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return "done"

    monkeypatch.setattr(memory, "recover", lambda policy: None)
    assert memory.with_oom_retry(policy, 100, functools.partial(work, fitting=43)) == (42, "done")
    assert budgets == [100, 75, 56, 42]
    assert "reducing micro-batches to 42 tokens" in capsys.readouterr().err
    with pytest.raises(RunStopped, match="out of GPU memory"):
        memory.with_oom_retry(policy, 100, functools.partial(work, fitting=41))


@pytest.mark.parametrize("overflow_at", [1, 2])
@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("flags", [{}, {"train_vision": True}, {"lora_rank": 4}])
def test_gradients_after_an_overflow_are_those_without_it(tiny_model, flags, hook, overflow_at):
    """In bfloat16, as on a GPU: also if the very first pass overflows, before FSDP has gathered the last layers."""
    device, calls = distributed.start(), []

    def overflow(*_):
        calls.append(1)
        if len(calls) == overflow_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    def gradients(overflows: bool) -> list[torch.Tensor]:
        policy = apply_fsdp(load_policy(tiny_model, PolicyFlags(**flags), device), device, torch.bfloat16)
        if overflows:
            getattr(language_model(policy.model).layers[1], hook)(overflow)
        g = torch.Generator().manual_seed(0)
        groups = [make_group(policy.model, "qwen2_5_vl", 9, [(4, 4)], [5, 3], g) for _ in range(2)]

        def work(budget: int) -> None:
            with unsharded(policy):
                for batch, _ in micro_batches(policy, groups, budget):
                    reduce_gradients(policy, now=False)
                    policy(batch)[0].sum().backward()
                take_gradients(policy)

        budget, _ = memory.with_oom_retry(policy, 40 if overflows else 30, work)
        assert budget == 30
        return [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]

    got, want = gradients(overflows=True), gradients(overflows=False)
    assert len(calls) > overflow_at
    assert any(gradient.any() for gradient in want)
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_a_teacher_is_planned_for_with_its_whole_tower_on_each_gpu(policy, tiny_model):
    """Its other weights are sharded. A new adapter that its own base teaches needs nothing more."""
    without = plan(policy, number=4, sharding="full")
    planned = plan(policy, number=4, sharding="full", teacher=tiny_model, dtype="bfloat16")
    tower = sum(p.numel() for p in vision_parameters(policy.model))
    assert planned.weights - without.weights == 2 * tower
    assert planned.reference == 2 * (num_weights(policy) - tower) / 4
    same = dict(number=4, sharding="full", lora_rank=4, model=tiny_model)
    assert plan(policy, **same, teacher=tiny_model).resting == plan(policy, **same).resting
