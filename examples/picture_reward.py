"""A reward that looks at the picture: --plugin examples/picture_reward.py --task colour."""

import rewards

COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0), "white": (255,) * 3}


def colour(completion, answer, images, **fields):
    """Score 1 if the completion is the name of the picture's mean colour; the row's answer does not count."""
    mean = images[0].convert("RGB").resize((1, 1)).getpixel((0, 0))
    nearest = min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], mean)))
    return float(completion.strip().lower() == nearest)


rewards.TASKS["colour"] = rewards.Task(colour, template="{{ content }} Reply with the name of the colour only.")
