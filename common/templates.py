"""Jinja templates: those that users give (`--template`, `--verifier_template`), and the chat template of a model."""

import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.meta
import jinja2.sandbox

from common.errors import UserError
from common.records import TAG, Turn


def parse_template(text: str, flag: str, names: Sequence[str]) -> jinja2.Template:
    """Return the template `text`, which must contain each of `names`, such as {{ content }}.

    The message of an error begins with `flag`.
    """
    values = {name: f"the {name} of the check" for name in names}
    try:
        template = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(text)
        rendered = template.render(values)
    except Exception as error:  # noqa: BLE001 - a template is a program, which can raise anything
        raise UserError(f"{flag}: {error}") from None
    if missing := [name for name in names if values[name] not in rendered]:
        raise UserError(f"{flag} does not contain the {missing[0]}: add {{{{ {missing[0]} }}}}")
    return template


def read_template(path: str, flag: str, names: Sequence[str]) -> jinja2.Template:
    """Read and check the template in the file `path`, which the user named with `flag`; see `parse_template`."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path!r} ({error}): check {flag}") from None
    return parse_template(text, f"{flag} {path}", names)


def template_variables(settings: Sequence[str], chat_template: str) -> dict[str, Any]:
    """Return the variables that the flag --chat_template_kwargs sets, given as NAME=VALUE; values are JSON or text.

    A name that the `chat_template` does not use is refused.
    """
    if not settings:
        return {}
    names, variables = variable_names(chat_template), {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name.isidentifier() and equals):
            raise UserError(f"--chat_template_kwargs {setting}: must be NAME=VALUE, such as enable_thinking=false")
        if name not in names:
            raise UserError(f"--chat_template_kwargs {setting}: the model's chat template has no variable {name}")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


@functools.cache
def variable_names(chat_template: str) -> set[str]:
    """Return the names of the variables that a chat template uses."""
    standard = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", chat_template)  # tags that only transformers knows
    parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(standard)
    return jinja2.meta.find_undeclared_variables(parsed)


def write_chat(turns: Sequence[Turn], tokenizer: Any, variables: Mapping[str, Any], is_answered: bool = False) -> str:
    """Write `turns` with the chat template of a Hugging Face `tokenizer`, up to where the answer begins.

    `is_answered`: the last turn is the answer, so none begins. `variables`: further variables of the template. If it
    leaves out a text, it gets all turns as lists of parts. Raises ValueError if it refuses the turns or still leaves
    out a text.
    """
    for as_parts in (False, True):
        messages = [{"role": turn.role, "content": _content(turn, as_parts)} for turn in turns]
        try:
            chat = tokenizer.apply_chat_template(
                messages, add_generation_prompt=not is_answered, tokenize=False, **variables
            )
        except Exception as error:  # noqa: BLE001
            raise ValueError(f"the model's chat template refuses the prompt: {str(error)[:160]}") from None
        if all(piece.strip() in chat for turn in turns for piece in turn.content if isinstance(piece, str)):
            return chat
    raise ValueError("the model's chat template leaves out a part of a turn or of the system prompt")


def control_tokens(tokenizer: Any) -> list[str]:
    """Return the special tokens of a Hugging Face `tokenizer`, except `<image>`, which always becomes an image."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [token for token in tokens if token != TAG]


def answer_end(tokenizer: Any) -> tuple[str, str]:
    """Return the text that the chat template writes between an answer and the token that ends it, and that token.

    The token is the first control token after the answer: that of its end or, in templates without one (GLM), that of
    the next turn's role. It is "" if there is neither. Raises ValueError if the template refuses an answer.
    """
    mark, control = "the answer", control_tokens(tokenizer)
    chat = [Turn("user", ["question"]), Turn("assistant", [mark])]
    try:
        write_chat(chat, tokenizer, {}, is_answered=True)
    except ValueError:
        chat.insert(0, Turn("system", ["system"]))  # the template may need one
    for turns in (chat, [*chat, Turn("user", ["question"])]):
        after = write_chat(turns, tokenizer, {}, is_answered=True).rpartition(mark)[2]
        if ends := [(after.index(token), -len(token), token) for token in control if token in after]:
            place, _, token = min(ends)
            return after[:place], token
    return "", ""


def _content(turn: Turn, as_parts: bool) -> str | list[dict]:
    if not as_parts and all(isinstance(piece, str) for piece in turn.content):
        return turn.text
    return [{"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"} for piece in turn.content]
