"""What an environment answers, as tokens: nothing that was sampled is tokenized again (docs/turns.md)."""

from common.records import ImageSource, Sample, Turn
from common.templates import variable_names, write_chat
from data import Processor, opening_of, prompt_turns


def reply_role(processor: Processor) -> str:
    """Return the role of an answer: "tool" or, if the chat template has no tools or changes the answer, "user"."""
    image = processor.family.vision.token if processor.family.vision else ""
    answer: list[str | ImageSource | None] = ['an "answer"\nof two lines', *([None] if image else [])]
    try:
        turns = [Turn("user", ["question"]), Turn("assistant", ["call"]), Turn("tool", answer)]
        chat = write_chat(turns, processor.tokenizer, processor.chat_variables)
    except ValueError:
        return "user"
    return "tool" if "tools" in variable_names(processor.tokenizer.chat_template) and image in chat else "user"


def encode_reply(sample: Sample, reply: Turn, last: int, processor: Processor) -> tuple[list[int], str]:
    """Return the sampler's token ids of what a model sees between two turns, and what opens the second (`opening`).

    The ids are what the chat template writes after the text of the model's turn: the end of that turn, unless the model
    sampled it as its `last` token; the turn `reply`; and the beginning of the next turn. Raises ValueError if `reply`
    contains a control token, or if the template refuses it.
    """
    text, mark = reply.text, "the answer"
    for token in processor.control_tokens:
        if token in text:
            raise ValueError(f"the answer contains {token}, which would act as a control token")
    while mark in text:
        mark += "."
    turns = [*prompt_turns(sample, processor), Turn("assistant", [mark]), reply]
    after = write_chat(turns, processor.tokenizer, processor.chat_variables).rpartition(mark)[2]
    ids = processor.tokenizer(after, add_special_tokens=False).input_ids
    if ids.count(processor.image_token_id) != sum(not isinstance(piece, str) for piece in reply.content):
        raise ValueError("the chat template leaves out an image")
    return ids[1:] if ids[0] == last else ids, opening_of(after, processor.control_tokens)
