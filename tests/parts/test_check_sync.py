"""vLLM's weights are compared with the trainer's."""

import pytest
import torch

from common.errors import RunStopped
from sampling.vllm_engine import VLLMEngine

check_sync = pytest.importorskip("parts.check_sync", reason="needs parts/check_sync.py, which is not here")
VLLMEngine.sync_weights = check_sync.sync  # for other tests in this process
check_weights = check_sync.check_weights


class FusedLayer(torch.nn.Module):
    """A layer with vLLM's fused weights: four heads of 2 dimensions, and two of keys and values."""

    num_heads, num_kv_heads, head_size = 4, 2, 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 8))


def test_a_weight_that_does_not_reach_vllm_is_found():
    """vLLM fuses projections. The trainer's are compared one by one."""
    mlp = torch.nn.ModuleDict({"gate_up_proj": torch.nn.Linear(8, 6, bias=False)})
    model = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"qkv_proj": FusedLayer()}), "mlp": mlp})
    q, k, v = model["self_attn"]["qkv_proj"].weight.detach().clone().split([8, 4, 4])
    gate, up = mlp["gate_up_proj"].weight.detach().clone().chunk(2)
    sent = {"self_attn.q_proj.weight": q, "self_attn.k_proj.weight": k, "self_attn.v_proj.weight": v}
    sent |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    check_weights(sent.items(), model)
    for name in sent:
        with pytest.raises(RunStopped, match=f"{name} differs between vLLM and the trainer"):
            check_weights((sent | {name: sent[name] + 1}).items(), model)
    with pytest.raises(RunStopped, match=r"norm\.weight is missing in vLLM"):
        check_weights([*sent.items(), ("norm.weight", q)], model)
    check_weights([*sent.items(), ("tower.post_norm.weight", q)], model, unused="post_norm")


def test_an_lm_head_that_vllm_does_not_tie_to_the_embedding_is_found():
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    model = torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})
    sent = [("embed_tokens.weight", embedding.weight)]
    with pytest.raises(RunStopped, match="set tie_word_embeddings in the text_config"):
        check_weights(sent, model)
    check_weights([*sent, ("lm_head.weight", head.weight)], model)
    head.weight = embedding.weight
    check_weights(sent, model)
