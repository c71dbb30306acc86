"""The prompts of data.py have the token ids that transformers 4.57.1 gives, with the real tokenizers.

Guards against: a missing or second BOS token, text that is encoded piece by piece, white space that gets lost,
variables of the chat template that have no effect, and pictures with too few or too many tokens.
"""

import functools
import json
import pathlib
from dataclasses import dataclass, field

import pytest
import torch
from PIL import Image

from common.records import Sample
from data import Processor, encode_prompt, load_processor
from tests.elsewhere.conftest import run_in
from tests.helpers.rows import make_sample

TEXTS = {
    "plain": "How many apples are there?",
    "unicode": "数学 naïve e\u0301 ½ Ω ﬁ — «ça» 👩\u200d🚀 العربية हिन्दी",
    "white space": "def f(x):\n\treturn x ** 2\n\n\n    # twelve   spaces:            12\r\n1234567890",
    "trimmed": "  a question that begins and ends with spaces \n",
    "ordinary tags": "<tool_call>{}</tool_call> <|not_a_token|> [INST] </s> and </think>",
}


@dataclass
class Chat:
    """A prompt of this project, and what transformers gets for it."""

    name: str
    sample: Sample
    messages: list[dict]
    images: list[str] = field(default_factory=list)
    variables: dict = field(default_factory=dict)


def text_chats() -> list[Chat]:
    chats = [Chat(kind, make_sample(text, "1", [], kind), [user(text)]) for kind, text in TEXTS.items()]
    text, system = "How many?", "Count the objects.\nReply with a number."
    with_system = [{"role": "system", "content": system}, user(text)]
    return [*chats, Chat("system", make_sample(text, "1", [], "system", system=system), with_system)]


def picture_chats(folder: pathlib.Path) -> list[Chat]:
    files = [folder / "wide.png", folder / "high.png"]
    gradient = Image.linear_gradient("L").convert("RGB")
    gradient.resize((224, 112)).save(files[0])
    gradient.rotate(90).resize((140, 168)).save(files[1])
    chats = []
    for name, text, number in (("picture", "<image>How many?", 1), ("two pictures", "First <image> then <image>.", 2)):
        parts = []
        for i, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": piece}] * bool(piece)
        images = [*map(str, files[:number])]
        chats.append(Chat(name, make_sample(text, "1", images, name), [user(parts)], images))
    return chats


def user(content: str | list[dict]) -> dict:
    return {"role": "user", "content": content}


NOT_THINKING = Chat(
    "template variable", make_sample("Why?", "1", [], ""), [user("Why?")], [], {"enable_thinking": False}
)
KINDS = {
    "qwen3": [*TEXTS, "system", NOT_THINKING.name],
    "llama": [*TEXTS, "system"],
    "qwen2_5_vl": ["picture", "two pictures"],
    "internvl": ["picture", "two pictures"],
    "glm4v": ["picture", "two pictures"],
}
CASES = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]


@functools.cache
def load(folder: pathlib.Path, template: str, *variables: str) -> Processor:
    """Return the processor of this project, with a task that adds nothing to the question."""
    return load_processor(str(folder), "count", template, max_pixels=12 * 448 * 448, chat_template_kwargs=variables)


@pytest.fixture(scope="session")
def template(work) -> str:
    path = work / "question.jinja"
    path.write_text("{{ content }}")
    return str(path)


@pytest.fixture(scope="session")
def chats(work, bases) -> dict[tuple[str, str], tuple[Chat, dict]]:
    """Return each chat, and what transformers gives for it, by name of the base and kind."""
    kinds = {chat.name: chat for chat in [*text_chats(), NOT_THINKING, *picture_chats(work)]}
    cases = [case for case in CASES if case[0] in bases]
    requests = []
    for name, kind in cases:
        chat = kinds[kind]
        request = {"messages": chat.messages, "images": chat.images, "variables": chat.variables}
        requests.append({"model": str(work / "bases" / name), **request})
    (work / "chats.json").write_text(json.dumps(requests))
    run_in("elsewhere", "prompts", work / "chats.json", work / "chats.pt")
    outputs = torch.load(work / "chats.pt")
    return {case: (kinds[case[1]], output) for case, output in zip(cases, outputs, strict=True)}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_ids_are_those_of_transformers(name, kind, chats, work, template):
    chat, theirs = chats[name, kind]
    variables = [f"{key}={json.dumps(value)}" for key, value in chat.variables.items()]
    processor = load(work / "bases" / name, template, *variables)
    prompt = encode_prompt(chat.sample, processor)
    assert prompt.ids.tolist() == theirs["ids"]
    if chat.images:
        torch.testing.assert_close(prompt.vision["pixel_values"], theirs["pixel_values"], atol=1e-5, rtol=0)
    if bos := processor.tokenizer.bos_token_id:
        assert theirs["ids"].count(bos) == 1 and theirs["ids"][0] == bos


@pytest.mark.parametrize(("name", "token"), [("qwen3", "<|im_start|>"), ("llama", "<|eot_id|>")])
def test_text_that_would_act_as_a_control_token_is_refused(name, token, bases, work, template):
    with pytest.raises(ValueError, match="would act as a control token"):
        encode_prompt(make_sample(f"{token}system", "1", [], "row 1"), load(work / "bases" / name, template))
