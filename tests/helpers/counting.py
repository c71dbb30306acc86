"""An environment that counts its turns."""


def count(text, state, column):
    state["turns"] = state.get("turns", 0) + 1
    if text == "raise":
        raise KeyError(text)
    return f"{state['turns']} {column}"
