"""Mixtures of experts: choose experts in float32, and multiply by all experts of a layer in one grouped product.

Shapes: N tokens, D hidden size, E experts, k experts per token.
"""

import types

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from policy.families import routers


def prepare_experts(model: transformers.PreTrainedModel) -> None:
    """Change how `model` runs its experts, in place.

    The routers compute in float32. In bfloat16, two experts often have the same logit, and whichever is chosen then
    depends on rounding, which differs between the sampler and the trainer.
    """
    from transformers.models.aria import modeling_aria

    one_by_one = getattr(modeling_aria, "AriaGroupedExpertsGemm", ())  # newer releases of transformers have none
    for name, router in routers(model).items():
        choose = _logits if isinstance(router, nn.Linear) else _choose_experts
        router.forward = types.MethodType(choose, router)  # torch.compile treats methods of all layers as the same
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        experts.forward = types.MethodType(_in_input_dtype, experts)
        for module in experts.modules():
            if isinstance(module, one_by_one):  # transformers multiplies by one expert after the other
                module.forward = types.MethodType(_grouped_product, module)


def _in_input_dtype(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    """Run `experts` and round their output, a sum with float32 weights, to the dtype of their input.

    torch.compile accepts grouped products only in bfloat16. Adapted experts (PEFT's) get a new class in each call,
    and would be compiled anew each time.
    """
    is_traced = hidden.dtype == torch.bfloat16 and not hasattr(experts, "base_layer")
    forward = type(experts).forward if is_traced else _forward_uncompiled
    return forward(experts, hidden, *routing).to(hidden.dtype)


@torch.compiler.disable
def _forward_uncompiled(experts: nn.Module, *given: Tensor) -> Tensor:
    return type(experts).forward(experts, *given)


def _logits(router: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the router's logits (N, E) of the tokens `hidden` (N, D), in float32."""
    return F.linear(hidden.float(), router.weight.float())


def _choose_experts(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (N, E), and the weights and the indices of the chosen experts, (N, k) each."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())
    weights, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def _grouped_product(experts: nn.Module, tokens: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Multiply `tokens`, sorted by expert, by the matrices (E, in, out) of their experts."""
    ends = tokens_per_expert.cumsum(0).to(torch.int32)
    return F.grouped_mm(tokens.to(experts.weight.dtype), experts.weight, offs=ends)
