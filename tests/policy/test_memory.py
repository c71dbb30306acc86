"""What is chosen for a GPU's memory, on paper: the choice is arithmetic and needs no GPU."""

import weakref

import pytest
import torch

from common import distributed
from common.errors import UserError
from config import PolicyFlags
from policy import memory
from policy import sharding as sharding_module
from policy.forward import language_model
from policy.model import load_policy
from policy.sharding import apply_fsdp

GPU = torch.device("cuda")


@pytest.fixture
def policy(tiny_model):
    return load_policy(tiny_model, PolicyFlags(), torch.device("cpu"))


def free(monkeypatch, policy, again: int, tokens: int, compiled: bool = True) -> None:
    """A GPU with room for micro-batches of `tokens` tokens when `again` layers are checkpointed, and no more."""
    fixed = 12 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    text = language_model(policy.model)
    fixed += 12 * memory.LOGIT_ROWS * len(text.embed_tokens.weight) + 12 * sum(
        p.numel() for p in text.layers[0].parameters()
    )
    total = 2**34
    room = fixed + memory.MARGIN * total + (tokens + 0.5) * memory.bytes_per_token(policy, again, compiled)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def checkpointed(policy) -> list[bool]:
    return [layer.gradient_checkpointing for layer in language_model(policy.model).layers]


@pytest.mark.parametrize(
    ("again", "tokens", "want", "want_tokens"),
    [
        (0, 50_000, [False] * 4, memory.MOST_TOKENS),  # more than is of use
        (0, 9_000, [False] * 4, 9_000),
        (1, 9_000, [False, False, False, True], 9_000),
        (2, 9_000, [False, True] * 2, 9_000),
        (4, 9_000, [True] * 4, 9_000),
        (4, 3_000, [True] * 4, 3_000),  # fewer than it would like, enough for the longest row
    ],
)
def test_as_few_layers_are_checkpointed_as_fit(policy, monkeypatch, again, tokens, want, want_tokens):
    free(monkeypatch, policy, again, tokens)
    assert memory.choose_micro_batch_size(policy, None, PolicyFlags(), 2000, GPU) == want_tokens
    assert checkpointed(policy) == want
    assert policy.model.is_gradient_checkpointing == (again > 0), "what decides whether derivatives are kept"


def test_many_tokens_asked_for_are_checkpointed_for(policy, monkeypatch):
    free(monkeypatch, policy, 2, 20_000)
    assert memory.choose_micro_batch_size(policy, None, PolicyFlags(micro_batch_tokens=20_000), 2000, GPU) == 20_000
    assert checkpointed(policy) == [False, True] * 2


@pytest.mark.parametrize(
    ("tokens", "flag", "want", "of_reference"),
    [
        (9_000, "auto", False, True),  # micro-batches fill the memory; without gradients little of it is needed
        (50_000, "auto", True, True),
        (50_000, "layer", False, False),
        (9_000, "update", True, True),
    ],
)
def test_weights_are_gathered_once_where_they_fit(tiny_model, policy, monkeypatch, tokens, flag, want, of_reference):
    distributed.start()
    free(monkeypatch, policy, 0, tokens)
    cpu = torch.device("cpu")
    policy, reference = (
        apply_fsdp(p, cpu, torch.float32) for p in (policy, load_policy(tiny_model, PolicyFlags(), cpu))
    )
    memory.choose_micro_batch_size(policy, reference, PolicyFlags(gather=flag), 2000, GPU)
    assert (policy.keep_unsharded, reference.keep_unsharded) == (want, of_reference)
    offloaded = PolicyFlags(gather=flag, offload_reference=True)
    memory.choose_micro_batch_size(policy, reference, offloaded, 2000, GPU)
    assert (policy.keep_unsharded, reference.keep_unsharded) == (want, False)


def test_float32_and_a_trained_tower_take_more(tiny_model, policy):
    assert memory.bytes_per_token(policy, 0, True, torch.float32) > 1.9 * memory.bytes_per_token(policy, 0, True)
    tower = load_policy(tiny_model, PolicyFlags(train_vision=True), torch.device("cpu"))
    cost = [memory.bytes_per_token(p, again, True) for p in (policy, tower) for again in (0, 4)]
    assert cost[2] - cost[0] > cost[3] - cost[1] > 0, "checkpointing spares the tower's blocks too"


class Card:
    total_memory = 2 * 2**20


@pytest.mark.parametrize(
    ("flags", "sampler", "message"),
    [
        ({}, 0.2, r"weights, gradients, AdamW take .* --lora_rank 64, --load_in_4bit with it, --offload_optimizer,"),
        (
            {"lora_rank": 4},
            0.2,
            r"What helps: --load_in_4bit, --offload_optimizer, a smaller --vllm_memory, more GPUs$",
        ),
        ({"lora_rank": 4}, 0.9, r"weights, AdamW and --vllm_memory take"),
    ],
)
def test_a_gpu_too_small_for_the_weights_says_what_helps(tiny_model, monkeypatch, flags, sampler, message):
    flags = PolicyFlags(**flags)
    policy = load_policy(tiny_model, flags, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    with pytest.raises(UserError, match=message):
        memory.check_gpu_memory(policy, flags, True, GPU, sampler)
    memory.check_gpu_memory(policy, flags, True, torch.device("cpu"), sampler)


@pytest.mark.parametrize(
    ("processes", "here", "share", "want"),
    [
        (1, 1, 9.0, "full"),  # one process: the same as a whole copy
        (4, 4, 0.3, "none"),
        (4, 4, 0.4, "full"),
        (16, 8, 0.3, "none"),
        (16, 8, 5.0, "hybrid"),  # of eight GPUs two thirds hold it
        (16, 8, 6.0, "full"),
    ],
)
def test_weights_are_sharded_where_they_take_much_of_a_gpu(policy, monkeypatch, processes, here, share, want):
    """`share`: what weights, gradients and optimizer take of a GPU."""
    state = sum(memory.state_bytes(policy, PolicyFlags(), True))
    assert state > 18 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    monkeypatch.setattr(memory, "usable_bytes", lambda device, limit: state / share)
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    monkeypatch.setattr(distributed, "local_world_size", lambda: here)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value] * processes)
    assert memory.choose_sharding(policy, PolicyFlags(), True, GPU) == want
    assert memory.choose_sharding(policy, PolicyFlags(sharding="none"), True, GPU) == "none"


@pytest.mark.parametrize("here", [8, 4])
def test_hybrid_over_unequal_machines_is_refused_and_never_chosen(policy, monkeypatch, here):
    state = sum(memory.state_bytes(policy, PolicyFlags(), True))
    monkeypatch.setattr(memory, "usable_bytes", lambda device, limit: state / 2)
    monkeypatch.setattr(distributed, "world_size", lambda: 12)
    monkeypatch.setattr(distributed, "local_world_size", lambda: here)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [8] * 8 + [4] * 4 if value == here else [value])
    assert memory.choose_sharding(policy, PolicyFlags(), True, GPU) == "full"
    with pytest.raises(UserError, match="as many processes on every machine"):
        memory.choose_sharding(policy, PolicyFlags(sharding="hybrid"), True, GPU)


def test_a_part_of_a_gpu_is_filled_as_a_whole_smaller_one(policy, monkeypatch):
    """12 GiB of a GPU of 16, as much free of them as of a GPU that has 12."""
    free(monkeypatch, policy, 2, 9_000)
    available, total = torch.cuda.mem_get_info(GPU)
    used = 12 * 2**30 - (available - memory.MARGIN * (total - 12 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
    assert memory.choose_micro_batch_size(policy, None, PolicyFlags(), 2000, GPU, limit=12.0) == 9_000
    assert checkpointed(policy) == [False, True] * 2


def test_flags_decide_where_they_are_given(policy, monkeypatch):
    free(monkeypatch, policy, 0, 50_000)
    flags = PolicyFlags(micro_batch_tokens=777, activation_checkpointing="full")
    assert memory.choose_micro_batch_size(policy, None, flags, 2000, GPU) == 777
    assert checkpointed(policy) == [True] * 4
    assert (
        memory.choose_micro_batch_size(policy, None, PolicyFlags(micro_batch_tokens=777), 2000, torch.device("cpu"))
        == 777
    )


def test_a_row_that_cannot_fit_says_what_is_missing(policy, monkeypatch):
    free(monkeypatch, policy, 4, 1000)
    with pytest.raises(UserError, match=r"too small by 0\.\d GiB for a prompt and completion of 2000 tokens.*--max_p"):
        memory.choose_micro_batch_size(policy, None, PolicyFlags(), 2000, GPU)


@pytest.mark.parametrize(
    "flags", [{}, {"train_vision": True}, {"lora_rank": 4}, {"load_in_4bit": True, "lora_rank": 4}]
)
def test_nothing_stays_whole_where_the_model_was_loaded(flags, tiny_model, monkeypatch):
    """FSDP moves a layer to the device and takes its share; were the layer kept, a device would have to hold all."""
    device, flags = distributed.start(), PolicyFlags(**flags)
    policy = load_policy(tiny_model, flags, device)
    ignored = "model" if flags.load_in_4bit else ".visual."
    parameters = policy.named_parameters()
    sharded = {name: weakref.ref(p) for name, p in parameters if p.requires_grad or ignored not in name}
    shard, whole = sharding_module.fully_shard, []

    def watched(module, **how):
        shard(module, **how)
        whole.append([name for name, parameter in sharded.items() if parameter() is not None])

    monkeypatch.setattr(sharding_module, "fully_shard", watched)
    apply_fsdp(policy, device, torch.float32)
    assert len(whole) >= 5 and len(whole[0]) > len(whole[1]) > 0
    assert whole[-1] == []
