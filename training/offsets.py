"""The tokens of a span of text, for rewards of parts of a completion.

Such a reward returns [(start, end, value), ...], with indices of characters. A token belongs to the span that holds the
character of its first byte.
"""

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

from tokenizers.decoders import DecodeStream

from common.errors import StepFailed
from common.records import Rewards, Rollout, ScoredGroup
from data import Processor
from grading.answers import without_marks


def in_tokens(group: ScoredGroup, processor: Processor) -> list[Rewards]:
    """Return the rewards of `group` with spans counted in tokens. Spans without a token are left out."""
    found = []
    for rollout, rewards in zip(group.rollouts, group.rewards):
        first, opening = 0, group.prompt.opening
        if trajectory := rollout.trajectory:  # rewards see the text of the last turn
            first, opening = len(rollout.ids) - trajectory.turn_lengths[-1], trajectory.opening
        last_turn = replace(rollout, ids=rollout.ids[first:])
        starts = token_starts(last_turn, opening, processor) if rewards.spans else []
        edges = [(first + bisect_left(starts, s.start), first + bisect_left(starts, s.end)) for s in rewards.spans]
        tokens = [replace(span, start=start, end=end) for span, (start, end) in zip(rewards.spans, edges)]
        found.append(replace(rewards, spans=tuple(span for span in tokens if span.start < span.end)))
    return found


def token_starts(rollout: Rollout, opening: str, processor: Processor) -> list[int]:
    """Return for each token the index, in the text that rewards see, of the character that holds its first byte.

    The completion's text begins with `opening`. Raises StepFailed if the tokenizer decodes single tokens differently.
    """
    stream, text, starts = DecodeStream(skip_special_tokens=False), opening, []
    pending: list[int] = []  # tokens that may lie inside a character
    for token in rollout.ids.tolist():
        begun = processor.tokenizer.decode(pending) if pending else ""
        while not rollout.text[len(text) :].startswith(begun):
            begun = begun[:-1]
        starts.append(len(without_marks(text + begun)))
        decoded = stream.step(processor.tokenizer.backend_tokenizer, token)
        text, pending = text + (decoded or ""), [*pending, token] if decoded is None else []
    if not (text.startswith(rollout.text) or rollout.text.startswith(text)):  # with a stop token, or half a character
        raise StepFailed(f"spans need a tokenizer that decodes token by token, but {rollout.text[:60]!r} changes")
    return [*accumulate(reversed(starts), min)][::-1]  # a token in a mark starts where the text after the mark does
