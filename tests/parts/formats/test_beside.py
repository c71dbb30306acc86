"""What a row or a turn has beside its text is used or refused by name, as ms-swift, TRL, LLaMA-Factory, … write it."""

import json

import pytest

pytest.importorskip("parts.formats", reason="needs parts/formats, which is not here")

from common.errors import UserError
from data import load_samples

CALL = {"type": "function", "function": {"name": "zoom", "arguments": {"x": 1}}}
THOUGHT = "<think>\nI count one, two, three.\n</think>\n\n"


def load(tmp_path, row: dict):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return load_samples(f"{tmp_path}/rows.jsonl", "vqa")[0]


def chat(answer: str = "3", earlier: dict | None = None, **beside) -> dict:
    """A chat that ends with an answer, and what this has beside it; `earlier`: what the answer before has."""
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "Yes.", **(earlier or {})}]
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": answer, **beside}]
    return {"messages": [*(before if earlier is not None else []), *turns]}


PLAIN = {"prompt": "How many?", "answer": "3"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
@pytest.mark.parametrize("text", ["I count one, two, three.", "<think>I count one, two, three.</think>\n"])
def test_a_reasoning_is_that_of_the_response(tmp_path, name, text):
    shape = {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "3", name: text}]}
    for row in (
        chat(**{name: text}),
        shape,
        PLAIN | {name: text},
        chat() | {name: text},
        {**PLAIN, "response": "3", name: text},
    ):
        sample = load(tmp_path, row)
        assert (sample.prompt, sample.answer, sample.responses) == ("How many?", "3", [THOUGHT + "3"])


@pytest.mark.parametrize(
    ("row", "response"),
    [
        (PLAIN | {"reasoning": "on", "thinking": False}, "3"),  # flags
        (PLAIN | {"thinking": "我数了一下有三个"}, "<think>\n我数了一下有三个\n</think>\n\n3"),
        (chat(reasoning="Three"), "<think>\nThree\n</think>\n\n3"),
        (PLAIN | {"response": THOUGHT + "3", "reasoning_content": "I count one, two, three."}, THOUGHT + "3"),
        (
            chat("<answer>3</answer>", reasoning_content="Two or 3."),
            "<think>\nTwo or 3.\n</think>\n\n<answer>3</answer>",
        ),
        (chat(reasoning_content=None, tool_calls=[], loss=True) | {"tools": "[]", "history": [[]]}, "3"),
        (chat(weight=1) | {"tools": None, "history": None, "functions": [None]}, "3"),
        (chat(earlier={"loss": False, "weight": 0, "thinking": True}), "3"),  # only the last answer is trained on
    ],
)
def test_what_a_row_says_otherwise(tmp_path, row, response):
    sample = load(tmp_path, row)
    assert (sample.answer, sample.responses) == ("3", [response])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat(tool_calls=[CALL]), "the assistant's turn has 'tool_calls', but tools and calls cannot be shown"),
        (chat(earlier={"tool_calls": [CALL]}), "turn has 'tool_calls'"),
        (chat(earlier={"function_call": {"name": "zoom", "arguments": "{}"}}), "turn has 'function_call'"),
        (chat(None, tool_calls=[CALL]), "turn has 'tool_calls'"),
        ({"prompt": chat(earlier={"tool_calls": [CALL]})["messages"][:-1], "answer": "3"}, "turn has 'tool_calls'"),
        (
            chat(earlier={"reasoning_content": "I see."}),
            "turn has 'reasoning_content', but a reasoning before the last",
        ),
        (chat() | {"tools": [CALL]}, "the column 'tools' holds tools or calls, which are not used"),
        (PLAIN | {"tools": json.dumps([CALL])}, "the column 'tools'"),
        (PLAIN | {"functions": [CALL]}, "the column 'functions'"),
        (PLAIN | {"tool_calls": [CALL]}, "the column 'tool_calls'"),
        (chat(loss=False), "last turn has 'loss': False, so it is not to be trained on"),
        (chat(weight=0), "last turn has 'weight': 0"),
        (chat(train=False), "last turn has 'train': False"),
        (PLAIN | {"loss": False}, "'loss' is false"),
        (
            PLAIN | {"history": [["Look.", "Yes."]]},
            "'history' holds earlier turns: write them and the question as a chat",
        ),
        ({"question": "And?", "answer": "3", "history": '[["Look.", "Yes."]]'}, "'history' holds earlier turns"),
        (chat() | {"history": [{"role": "user", "content": "Look."}]}, "'history' holds earlier turns"),
        ({"problem": "And?", "solution": "3", "chat_history": ["Look.", "Yes."]}, "'chat_history' holds earlier turns"),
        (chat("<think>So.</think>3", thinking="I count."), "'thinking' and the reasoning in the answer differ"),
        (
            PLAIN | {"thinking": "I count.", "reasoning": "I guess."},
            "'thinking' and the reasoning in the answer differ",
        ),
        (
            {"messages": [{"role": "system", "content": "Hi.", "tools": [CALL]}, *chat()["messages"]]},
            "system's turn has 'tools'",
        ),
        (chat([{"type": "thinking", "text": "So."}, {"type": "text", "text": "3"}]), "a part of a turn is 'thinking'"),
        (chat("", thinking="I count.") | {"solution": "3"}, "'thinking' stands beside an empty answer"),
        (chat(thinking=["I count."]), "'thinking' is not text"),
        (chat(thinking="So <answer>4</answer>"), "'thinking' contains tags of an answer"),
    ],
)
def test_what_is_not_used_is_refused_by_name(tmp_path, row, message):
    with pytest.raises(UserError, match=f"rows.jsonl row 1: .*{message}"):
        load(tmp_path, row)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_conversion_keeps_each_reasoning_once(tmp_path, name):
    convert = pytest.importorskip("parts.convert", reason="needs parts/convert, which is not here")
    rows = [PLAIN | {"reasoning_content": f"{text} I count."} for text in ("One.", "Two.", "One.")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = str(tmp_path / name)
    assert convert.convert(convert.Config("convert", f"{tmp_path}/rows.jsonl", output, skip_bad_rows=True)) == 2
    got = [sample.responses for sample in load_samples(output, "vqa")]
    assert got == [[f"<think>\n{text} I count.\n</think>\n\n3"] for text in ("One.", "Two.")]
