"""Jinja templates that users give: a prompt template (`--template`), or a verifier's prompt (`--verifier_template`)."""

import pathlib
from collections.abc import Sequence

import jinja2

from common.errors import UserError


def parse_template(text: str, flag: str, names: Sequence[str]) -> jinja2.Template:
    """Return the template `text`, which must contain each of `names`, such as {{ content }}.

    Raises UserError, which begins with `flag`, if the template is invalid or leaves out a name.
    """
    values = {name: f"the {name} of the check" for name in names}
    try:
        template = jinja2.Template(text, undefined=jinja2.StrictUndefined)
        rendered = template.render(values)
    except jinja2.TemplateError as error:
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
