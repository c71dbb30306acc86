"""Policies: load one, freeze or train its vision tower, shard it with FSDP2, hand out its whole weights."""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import parallel
from cli import UserError
from data import Prompt, Rollout, prompt_positions
from lora import adapted_weights, adapter_parameters, continue_adapter, has_adapter, new_adapter
from packing import (
    Group,
    PackedBatch,
    language_model,
    pack,
    pack_groups,
    take_packed_batches,
    token_logprobs,
    vision_features,
)

KEPT_FEATURES = 4 * 2**30  # bytes of image features that a process keeps on the host
MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**32  # bytes of host memory asked for at a time


@dataclass(kw_only=True)
class PolicyFlags:
    """The flags of the policy and its optimizer."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a fall to zero at the last update."""
    warmup: float = 0.0
    """Updates of linear warm-up; below 1, a share of all updates."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on a GPU, float32 on a CPU. Master weights are float32."""
    train_vision: bool = False
    """Train the vision tower too; it is frozen otherwise."""
    micro_batch_tokens: int = 0
    """Most packed tokens of one forward and backward, on which the gradient does not depend; 0: what fits into the
    GPU's free memory."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Layers that keep only their input and are computed again in the backward pass: none, every second, or all (a
    third more compute); auto takes as few as fit into the GPU's memory."""
    compile: bool = True
    """Fuse the small operations of each layer with torch.compile, on a GPU; costs a minute at the start."""
    lora_rank: int = 0
    """Rank of an adapter to train beside the frozen model; 0 trains the model itself."""
    lora_alpha: float = 0.0
    """α of the adapter, whose scale is α / rank; 0: twice the rank."""
    adapter: str | None = None
    """An adapter in PEFT layout to go on training, with its own rank and α; as it is, it is the KL reference."""
    load_in_4bit: bool = False
    """Keep the frozen model in 4 bits (bitsandbytes nf4, double quantisation) beside the adapter."""
    sharding: Literal["auto", "none", "hybrid", "full"] = "auto"
    """Weights, gradients and optimizer of each process: none, a whole copy; full, a share of one copy over all
    processes; hybrid, a share of a copy on each machine. auto: a whole copy where it takes less than a third of the
    GPU, else hybrid on several machines where it takes less than two thirds, else full."""
    gather: Literal["auto", "layer", "update"] = "auto"
    """When a process puts the weights of a layer together from their shares: each time it is run, or once for all
    micro-batches of an update, which takes a whole copy in `dtype`. auto: once where memory has room for that. A
    reference in host memory is never gathered once."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between updates."""
    offload_reference: bool = False
    """Keep the reference model in host memory; its layers come to the GPU one after another when they are needed."""

    def check_policy(self) -> None:
        """Raise ValueError for settings that cannot be."""
        if min(self.learning_rate, self.warmup, self.weight_decay) < 0:
            raise ValueError("learning_rate, warmup and weight_decay must not be negative")
        if self.max_grad_norm <= 0:
            raise ValueError("max_grad_norm must be above 0")
        if min(self.micro_batch_tokens, self.lora_rank, self.lora_alpha) < 0:
            raise ValueError("micro_batch_tokens, lora_rank and lora_alpha must not be negative")
        if self.adapter and (self.lora_rank or self.lora_alpha):
            raise ValueError("adapter has a rank and an α of its own: leave lora_rank and lora_alpha out")
        if self.lora_alpha and not self.lora_rank:
            raise ValueError("lora_alpha is of a new adapter: give lora_rank, or leave it out")
        if self.offload_reference and self.has_adapter:
            raise ValueError("offload_reference: beside an adapter there is no reference model; leave it out")
        if self.load_in_4bit and not self.has_adapter:
            raise ValueError("load_in_4bit freezes the model: give lora_rank or adapter, which are trained beside it")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """What to compute in on `device`."""
        return getattr(torch, self.dtype) if self.dtype != "auto" else parallel.compute_dtype(device)

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained in place of the model."""
        return bool(self.lora_rank or self.adapter)


class Policy(nn.Module):
    """A model behind one forward: packed batch in, token log-probabilities out.

    FSDP2 gathers a parameter only around the forward of the module it was sharded with, so whatever touches the
    embedding and the lm_head runs inside this one.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.gather_once = False
        """whether layers stay gathered from one micro-batch to the next; see `PolicyFlags.gather`"""

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(C,) log-probabilities and (C,) entropies of `batch`'s completion tokens; see `token_logprobs`."""
        # First, as where the images are real: every process must gather the same shards in the same order.
        nothing = 0.0 * self._blank_image() if batch.dummy_vision else 0.0
        logp, entropy = token_logprobs(self.model, batch, temperature)
        return logp + nothing, entropy

    def _blank_image(self) -> Tensor:
        """The vision tower on the smallest blank image: joins the collectives of the ranks that have real ones."""
        config = self.model.config.vision_config
        merge = config.spatial_merge_size
        device = next(self.parameters()).device
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(merge * merge, values, device=device)
        out = self.model.model.visual(pixels, grid_thw=torch.tensor([[1, merge, merge]], device=device))
        deepstack = getattr(out, "deepstack_features", None) or []  # Qwen3-VL: these have parameters of their own
        return out.pooler_output.sum() + sum(feature.sum() for feature in deepstack)


def load_model(
    name: str, dtype: torch.dtype, quantised_on: torch.device | None = None, to_shard: bool = False
) -> PreTrainedModel:
    """The causal or image-text model saved at `name`, on the CPU; or on `quantised_on`, the linear layers of its
    decoder stack in 4 bits. `to_shard`: the main process alone reads it, the others' is empty (meta) until
    `apply_fsdp`. Raises UserError when it cannot be loaded."""
    options: dict[str, object] = {"dtype": dtype, "attn_implementation": "sdpa"}
    config = load_config(name)
    if to_shard and not parallel.is_main():
        with _named(name), torch.device("meta"):
            return auto_class(config).from_config(config, **options)
    if quantised_on is not None:
        options |= {"quantization_config": four_bit(dtype), "device_map": {"": quantised_on}}
    with _named(name):
        return auto_class(config).from_pretrained(name, **options)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of the model at `name`. Raises UserError when it cannot be read and when the weights were saved
    quantised, which can neither be trained nor be added to."""
    with _named(name):
        config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{name!r} was saved quantised: name the model it was made from (--load_in_4bit quantises it on the way)"
        )
    return config


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What goes wrong with the files of the model at `name`, in one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise UserError(
            f"cannot load a model from {name!r} ({str(error).splitlines()[0][:160]}): a folder in Hugging Face layout "
            "or a hub name within reach is needed"
        ) from None


def auto_class(config: PreTrainedConfig) -> type:
    """The Auto class that makes a model of `config`."""
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def four_bit(dtype: torch.dtype) -> BitsAndBytesConfig:
    """nf4 with double quantisation (QLoRA, arXiv:2305.14314), computing in `dtype`; the vision tower, whose features
    the sampler shares, and the lm_head stay as they are."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["visual", "lm_head"],
    )


def load_policy(name: str, flags: PolicyFlags, device: torch.device, to_shard: bool = False) -> Policy:
    """The model at `name` as a policy with float32 master weights; its vision tower is frozen unless `train_vision`.

    With an adapter that alone is trained and float32, and the model is in the compute type or in 4 bits. `to_shard`:
    see `load_model`; a 4-bit model is whole everywhere.
    """
    dtype = flags.compute_dtype(device) if flags.has_adapter else torch.float32
    if flags.load_in_4bit:
        model = load_model(name, dtype, quantised_on=device)
    else:
        model = load_model(name, dtype, to_shard=to_shard)
    if flags.has_adapter:
        if flags.adapter:
            continue_adapter(model, flags.adapter)
        else:
            new_adapter(model, flags.lora_rank, flags.lora_alpha, flags.train_vision)
    for parameter in vision_parameters(model):
        parameter.requires_grad_(parameter.requires_grad and flags.train_vision)
    take_packed_batches(model, compiled=flags.compile and device.type == "cuda")
    model.train()
    return Policy(model)


def check_trained(policy: Policy, flags: PolicyFlags) -> None:
    """Raise UserError when `flags` leave nothing of an adapter to train, and say it when they ask for what it lacks."""
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"--adapter {flags.adapter}: it adapts the vision tower alone, nothing to train: give --train_vision"
        )
    blind = has_adapter(policy.model) and not any(".visual." in name for name in trained)
    if flags.train_vision and blind and parallel.is_main():
        print("--train_vision: the adapter has no part in a vision tower, which stays as it is", file=sys.stderr)


def load_reference(
    name: str, flags: PolicyFlags, device: torch.device, policy: Policy, sharding: str = "full"
) -> Policy:
    """The fixed reference of the KL term: `policy` itself when it has an adapter, which `lora.reference_weights`
    switches; else the model at `name` in the compute type, sharded, with the vision tower of `policy` when that is not
    trained."""
    if has_adapter(policy.model):
        return policy
    dtype = flags.compute_dtype(device)
    model = load_model(name, dtype, to_shard=True)
    if vision_parameters(model) and not flags.train_vision:
        model.model.visual = policy.model.model.visual
    take_packed_batches(model, compiled=flags.compile and device.type == "cuda")
    reference = Policy(model.eval().requires_grad_(False))
    return apply_fsdp(reference, device, dtype, sharding, offload=flags.offload_reference)


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of the vision tower, its merger included; none for a text model."""
    tower = getattr(model.model, "visual", None)
    return list(tower.parameters()) if tower is not None else []


def apply_fsdp(
    policy: Policy, device: torch.device, compute_dtype: torch.dtype, sharding: str = "full", offload: bool = False
) -> Policy:
    """Spread `policy` over the processes as `PolicyFlags.sharding` says: every decoder layer a unit, the rest
    (embedding, lm_head) with the root.

    Master weights stay float32, compute runs in `compute_dtype`, gradients are averaged in float32. A frozen vision
    tower stays whole on every process, so a batch of text alone touches no collective of it; so does a 4-bit model.
    `offload`: shards lie in host memory until a layer is run. Where processes but the main one have empty weights
    (`load_model`), they get their shares of its.
    """
    # No name may keep a parameter: FSDP moves each to the device before it takes its share, and would leave it there.
    empty = any(tensor.is_meta for tensor in itertools.chain(policy.parameters(), policy.buffers()))
    empty = bool(parallel.all_max(torch.tensor(int(empty))))
    whole = {name: tensor.detach() for name, tensor in [*policy.named_parameters(), *policy.named_buffers()] if empty}
    # inputs are left as they come: the residual stream stays float32
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    host = CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()
    options = {"mesh": parallel.mesh(device, sharding), "mp_policy": precision, "offload_policy": host}
    vision = vision_parameters(policy.model)
    quantised = any(hasattr(parameter, "quant_state") for parameter in policy.parameters())
    frozen = {p for p in (policy.parameters() if quantised else vision) if not p.requires_grad}
    # An adapter's part in a frozen tower is exported as it came; the reference's copy is cast, as the trained one is
    # for its forward, or the KL term would not start at zero.
    exported = set(adapter_parameters(policy.model).values())
    for parameter in frozen:
        keep = parameter in exported or not parameter.is_floating_point()
        dtype = parameter.dtype if keep else compute_dtype
        parameter.data = parameter.data.to("meta" if parameter.is_meta else device, dtype)
    for buffer in policy.buffers():
        buffer.data = buffer.data if buffer.is_meta else buffer.data.to(device)
    vision_trained = bool(vision) and not frozen.intersection(vision)
    del vision, exported  # see above
    if vision_trained:
        for block in policy.model.model.visual.blocks:
            fully_shard(block, **options)
    layers = language_model(policy.model).layers
    for layer in layers:
        fully_shard(layer, **options, ignored_params=frozen)
    fully_shard(policy, ignored_params=frozen, **options)
    if empty:
        _hand_out(policy, whole, device, torch.device("cpu") if offload else device)
    # the next layer is gathered beside this one's compute; in the backward pass that is so unasked
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    return policy


@torch.no_grad()
def _hand_out(policy: Policy, whole: dict[str, Tensor], device: torch.device, shards: torch.device) -> None:
    """Fill the sharded `policy`, one tensor after another, with the main process's `whole` parameters and buffers;
    empty shards come to lie on `shards`."""

    def there(tensor: Tensor) -> Tensor:
        where = shards if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    policy._apply(there)
    for name, own in [*policy.named_parameters(), *policy.named_buffers()]:
        tensor = torch.empty(own.shape, dtype=own.dtype, device=device)
        if parallel.is_main():
            tensor.copy_(whole.pop(name))
        dist.broadcast(tensor, 0)
        if isinstance(own, DTensor):
            tensor = distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None).to_local()
            own.to_local().copy_(tensor)
        else:
            own.copy_(tensor)


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments lie in host memory (`begin_moments`) and come to the GPU, one parameter's at a time, for the
    update alone."""

    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self.param_groups = [group | {"params": [parameter]}]
                    moments = [_own_part(self.state[parameter][name]) for name in MOMENTS]
                    places = [moment.data for moment in moments]
                    for moment in moments:
                        moment.data = moment.to(parameter.device)
                    super().step()
                    for moment, place in zip(moments, places):
                        moment.data = place.copy_(moment)
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place: PyTorch's brings all moments to the GPU at once."""
        own, parameters = self.state, [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        super().load_state_dict(state_dict | {"state": {}})
        for name, parameter in zip(names, parameters, strict=True):
            for key, value in state_dict["state"][name].items():
                own[parameter][key].copy_(value)
        self.state = own


def _own_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def host_places(sizes: list[int], pinned: bool) -> Iterator[Tensor]:
    """(size,) float32 zeros in host memory for each of `sizes`, cut from pieces of `PIECE` bytes: alone, PyTorch would
    round the page-locked memory of each up to a power of two, 1.9 times what the matrices of a 7B need."""
    coming, left = sum(sizes), torch.empty(0)
    for size in sizes:
        if len(left) < size:
            piece = max(size, min(coming, PIECE // 4))
            left = torch.zeros(1 << (piece - 1).bit_length(), pin_memory=pinned)
        yield left[:size]
        left, coming = left[size:], coming - size


def make_optimizer(
    policy: Policy, flags: PolicyFlags, updates: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW over what is trained (matrices decay, norms and biases do not) and its learning-rate schedule.

    The warm-up is in updates, below 1 a share of all `updates`; no update is spent at rate zero.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": flags.weight_decay}
    others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
    kind = HostAdamW if flags.offload_optimizer else torch.optim.AdamW
    optimizer = kind([decayed, others], lr=flags.learning_rate, fused=trained[0].device.type == "cuda")
    begin_moments(optimizer)
    shape = functools.partial(lr_factor, updates=updates, warmup=flags.warmup, schedule=flags.lr_schedule)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, shape)


def begin_moments(optimizer: torch.optim.AdamW) -> None:
    """The state that AdamW would make for a parameter at its first gradient, for all of them now: a checkpoint has it
    whenever it is written, and whoever loads one has where to put it. PyTorch itself would take an empty step for it,
    which counts."""
    parameters = [(parameter, group["fused"]) for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [_own_part(parameter).numel() for parameter, _ in parameters for _ in MOMENTS]
    places = host_places(sizes, pinned=parameters[0][0].is_cuda)
    for parameter, fused in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step} | {name: torch.zeros_like(parameter) for name in MOMENTS}
        for name in MOMENTS if isinstance(optimizer, HostAdamW) else ():
            own = _own_part(optimizer.state[parameter][name])
            own.data = next(places).view(own.shape)


def lr_factor(update: int, updates: int, warmup: float, schedule: str) -> float:
    """The learning rate of update 0, 1, … as a share of its peak: a linear rise, then constant, linear or cosine."""
    rise = warmup * updates if warmup < 1 else warmup
    if update < rise:
        return (update + 1) / (rise + 1)
    done = min((update - rise) / max(updates - rise, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


def micro_batches(policy: Policy, groups: list[Group], budget: int) -> Iterator[PackedBatch]:
    """`groups` packed and moved to the policy's device: as many micro-batches on every process, so that all of them
    take part in the same collectives, with blank ones (weight zero) where this process has fewer."""
    batches = pack_groups(groups, budget)
    most = int(parallel.all_max(torch.tensor(max(1, len(batches)))))
    if len(batches) < most:
        token = torch.zeros(1, dtype=torch.long)
        blank = Rollout(token, torch.zeros(1), old_logp=torch.zeros(1), ref_logp=torch.zeros(1))
        prompt = Prompt(token, [0], prompt_positions(policy.model.model, token, {}))
        batches += [pack([Group(prompt, [blank])]) for _ in range(most - len(batches))]
    if any(parameter.requires_grad for parameter in vision_parameters(policy.model)):
        with_images = parallel.all_max(torch.tensor([bool(batch.vision) for batch in batches]).int())
        for batch, anywhere in zip(batches, with_images.tolist()):
            batch.dummy_vision = bool(anywhere) and not batch.vision
    device = next(policy.parameters()).device
    for batch in batches:
        batch.flop = train_flop(policy, batch)
    # Copies of the weights exchange their gradients once, with the last micro-batch; with each one where the vision
    # tower is trained, which the last one may leave out.
    always = not isinstance(policy, FSDPModule) or any(p.requires_grad for p in vision_parameters(policy.model))

    def handed_out(batch: PackedBatch) -> PackedBatch:
        if not always:
            policy.set_requires_all_reduce(batch is batches[-1])
        return batch.to(device)

    return map(handed_out, batches)


@contextlib.contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """Where `gather_once` is set, layers stay gathered after their first use in here. Afterwards each process has its
    share alone again, also when the work breaks off between micro-batches (`memory.recover` ends a broken pass), and of
    the embedding and the lm_head too, which FSDP would leave whole after a forward pass without gradients."""
    if policy.gather_once:
        policy.set_reshard_after_forward(False)
        policy.set_reshard_after_backward(False)
    try:
        yield
    finally:
        let_go(policy)


def let_go(policy: Policy) -> None:
    """Leave each process its share of the weights alone."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def vision_share(policy: Policy) -> float:
    """What a patch costs the vision tower, as a share of what a token costs the decoder stack, by their numbers of
    parameters; 0 when the tower is frozen, whose features are known."""
    vision = vision_parameters(policy.model)
    if not any(parameter.requires_grad for parameter in vision):
        return 0.0
    return sum(p.numel() for p in vision) / sum(p.numel() for p in language_model(policy.model).layers.parameters())


def train_flop(policy: Policy, batch: PackedBatch) -> float:
    """Operations of a forward and backward pass: the gradients of activations cost as much as the forward pass, those
    of weights the share that is trained."""
    weights = dict.fromkeys((False, True), 0)
    for parameter in language_model(policy.model).parameters():
        weights[parameter.requires_grad] += parameter.numel()
    return forward_flop(policy, batch) * (2 + weights[True] / sum(weights.values()))


def forward_flop(policy: Policy, batch: PackedBatch) -> float:
    """Floating-point operations of a forward pass of the language model: two for each weight and token, four for each
    query, key and hidden unit that attention brings together."""
    model = language_model(policy.model)
    config = model.config
    weights = sum(math.prod(getattr(p, "quant_state", p).shape) for p in model.layers.parameters())
    pairs = sum(q * (k - q) + q * q / 2 for q, k in zip(batch.segments.q_lens, batch.segments.k_lens))
    head = config.hidden_size * config.vocab_size
    attention = config.num_hidden_layers * config.hidden_size * pairs
    return 2.0 * (weights * batch.input_ids.shape[1] + head * len(batch.targets)) + 4.0 * attention


@torch.no_grad()
def look(policy: Policy, prompts: list[Prompt], kept: dict[bytes, Tensor], at_once: int = 0) -> None:
    """Give each prompt the features of its images when the vision tower is frozen: once for the sampler, the reference
    and all updates, and once a run for those that `kept`, on the host, has room for. `at_once`: patches; on a CPU one
    prompt's, so that the last bits are the same in any company, and so after a resume."""
    visual = getattr(policy.model.model, "visual", None)
    if visual is None or any(parameter.requires_grad for parameter in visual.parameters()):
        return
    at_once = at_once or (32768 if next(visual.parameters()).is_cuda else 1)
    new = list({p.pictures: p for p in prompts if p.vision and p.pictures not in kept}.values())
    while new:
        batch, patches = [], 0
        while new and (not batch or patches + len(new[-1].vision["pixel_values"]) <= at_once):
            batch.append(new.pop())
            patches += len(batch[-1].vision["pixel_values"])
        inputs = [torch.cat([p.vision[name] for p in batch]) for name in ("pixel_values", "image_grid_thw")]
        device = next(visual.parameters()).device
        features = vision_features(visual, *(x.to(device) for x in inputs)).cpu()
        merged = visual.config.spatial_merge_size**2
        sizes = [len(prompt.vision["pixel_values"]) // merged for prompt in batch]
        kept |= {prompt.pictures: part.clone() for prompt, part in zip(batch, features.split(sizes))}
    for prompt in prompts:
        prompt.features = kept.get(prompt.pictures)
    while sum(part.nbytes for part in kept.values()) > KEPT_FEATURES:
        del kept[next(iter(kept))]  # the oldest


@torch.no_grad()
def record_logprobs(policy: Policy, groups: list[Group], name: str, temperature: float, budget: int) -> None:
    """Store the log-probabilities that `policy` gives each completion under the attribute `name`."""
    with gathered(policy):
        found = [(batch.rollouts, policy(batch, temperature)[0]) for batch in micro_batches(policy, groups, budget)]
    for rollouts, logp in found:  # to the host only now: no micro-batch waits for the one before
        for rollout, of_rollout in zip(rollouts, logp.cpu().split([len(r.ids) for r in rollouts])):
            setattr(rollout, name, of_rollout)


def full_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(in-memory name, whole tensor) of every parameter of the model, its adapter worked in; every process must go
    through all of it together."""
    return adapted_weights(policy.model)


@torch.no_grad()
def sampler_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """As `full_weights`, in the type that is computed in: a layer's shards are gathered at once, and let go again when
    those of the layer after it are asked for, so that no process holds more than two layers, or the embedding and the
    lm_head. A weight is to be copied before the next one is taken."""
    if has_adapter(policy.model) or not isinstance(policy, FSDPModule):
        yield from adapted_weights(policy.model)
        return
    units = {name: module for name, module in policy.named_modules() if isinstance(module, FSDPModule)}
    names: dict[str, list[str]] = {unit: [] for unit in units}
    for name, _ in policy.named_parameters():
        names[max((unit for unit in units if name.startswith(f"{unit}." if unit else "")), key=len)].append(name)
    order = sorted(units)
    gathered = units[order[0]].unshard(async_op=True)
    for unit, following in itertools.zip_longest(order, order[1:]):
        if gathered:
            gathered.wait()
        gathered = units[following].unshard(async_op=True) if following else None
        own = dict(units[unit].named_parameters(prefix=unit))
        yield from ((name.removeprefix("model."), own[name]) for name in names[unit])
        units[unit].reshard()


def saved_dtype(name: str) -> torch.dtype:
    """The dtype the model at `name` was saved in: what an export of its trained weights is saved in again."""
    dtype = AutoConfig.from_pretrained(name).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def stop_tokens(
    generation: GenerationConfig | dict | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Every token that ends a completion, from the generation config, the model's config and the tokenizer."""
    found = {tokenizer.eos_token_id}
    for source in (generation, config, getattr(config, "text_config", None)):
        eos = source.get("eos_token_id") if isinstance(source, dict) else getattr(source, "eos_token_id", None)
        found |= set(eos if isinstance(eos, list) else [eos])
    return sorted(token for token in found if token is not None)
