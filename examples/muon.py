"""Muon for the matrices of the decoder's layers, AdamW for the rest: --plugin examples/muon.py.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from dataclasses import dataclass

from torch.optim import Muon

from policy.families import language_model
from policy.optimizer import OPTIMIZERS, make_adamw, make_schedule


@dataclass
class Flags:
    muon_rate: float = 2e-5
    """Learning rate of Muon; --learning_rate is that of AdamW."""


def muon_and_adamw(policy, cfg, updates):
    layers = {p for p in language_model(policy.model).layers.parameters() if p.requires_grad and p.ndim == 2}
    others = [p for p in policy.parameters() if p.requires_grad and p not in layers]
    muon = Muon([p for p in policy.parameters() if p in layers], lr=cfg.muon_rate, weight_decay=cfg.weight_decay)
    return [*make_adamw(policy, cfg, updates, others), (muon, make_schedule(muon, cfg, updates))]


OPTIMIZERS["default"] = muon_and_adamw
