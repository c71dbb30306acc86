"""Make adapters that untie the head of a base from its embedding, with the PEFT of this environment.

    .venv-elsewhere/bin/python -m tests.elsewhere.untying WORK NAME...

The adapters are filled with random numbers. The logits that PEFT gives are written; merging has to keep them.
"""

import pathlib
import sys

import peft
import torch
import transformers

from tests.elsewhere.cases import UNTYING, expected_file, folder_of, inputs_file, untying_adapter
from tests.elsewhere.logits import last_logits
from tests.elsewhere.read import auto_class

SETTINGS = {
    "untied_by_copy": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "untied_by_lora": {"target_modules": ["q_proj", "lm_head"]},
}


def make_adapter(work: pathlib.Path, name: str, variant: str) -> None:
    """Save an adapter of the base `name`, and its logits."""
    source = folder_of(work, name, "base")
    config = transformers.AutoConfig.from_pretrained(source)
    base = auto_class(config).from_pretrained(source, dtype=torch.float32)
    embedding = base.get_input_embeddings().weight.clone()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    torch.manual_seed(3)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **SETTINGS[variant]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    assert torch.equal(base.get_input_embeddings().weight, embedding), "the head is not untied"
    model.save_pretrained(untying_adapter(work, name, variant))
    torch.save(last_logits(base, torch.load(inputs_file(work, name))), expected_file(work, name, variant))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for each in sys.argv[2:]:
        for kind in UNTYING:
            make_adapter(pathlib.Path(sys.argv[1]), each, kind)
