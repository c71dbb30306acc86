"""Write the token ids that the transformers of this environment gives for chats.

    .venv-elsewhere/bin/python -m tests.elsewhere.prompts CHATS.json OUTPUT

CHATS.json is a list of chats: `model`, a folder; `messages`; `images`, their files; `variables` of the chat template.
Texts are encoded with `apply_chat_template`. Pictures go through the real processor of the family.
"""

import functools
import json
import pathlib
import sys

import torch
import transformers
from PIL import Image


class NoVideo(transformers.BaseVideoProcessor):
    """Stands for the video processor, which would need torchvision. No chat here has a video."""

    def __init__(self):
        self.merge_size = self.temporal_patch_size = 2


@functools.cache
def load_tokenizer(model: str) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(model)


def encode(chat: dict) -> dict:
    """Return the `ids` of a chat, and the processor's other outputs if it has pictures."""
    tokenizer = load_tokenizer(chat["model"])
    options = {"add_generation_prompt": True, **chat["variables"]}
    if not chat["images"]:
        return {"ids": tokenizer.apply_chat_template(chat["messages"], tokenize=True, **options)}
    image_processor = transformers.AutoImageProcessor.from_pretrained(chat["model"], use_fast=False)
    model_type = transformers.AutoConfig.from_pretrained(chat["model"]).model_type
    processor_class = getattr(
        transformers, transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[model_type]
    )
    processor = processor_class(image_processor=image_processor, tokenizer=tokenizer, video_processor=NoVideo())
    text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, **options)
    images = [Image.open(path) for path in chat["images"]]
    outputs = processor(text=[text], images=images, return_tensors="pt")
    return {"ids": outputs["input_ids"][0].tolist(), "pixel_values": outputs["pixel_values"]}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.save([encode(chat) for chat in json.loads(pathlib.Path(sys.argv[1]).read_text())], sys.argv[2])
