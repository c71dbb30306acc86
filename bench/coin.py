"""A reward for benchmarks: heads or tails, from the text alone, so that every group has something to learn from."""

import zlib


def coin(completion: str, answer: str) -> float:
    return float(zlib.crc32(completion.encode()) % 2)
