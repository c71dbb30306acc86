"""A reward for benchmarks: a coin flip based on a hash of the text, so that nearly every group has a gradient."""

import zlib


def coin(completion: str, answer: str) -> float:
    """Return 0 or 1 with equal probability, always the same value for the same completion."""
    return float(zlib.crc32(completion.encode()) % 2)
