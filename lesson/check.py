"""Check an exercise: `python -m lesson.check 1`. With `--solution`, check the lesson's own solution."""

import argparse
import importlib
from types import ModuleType, SimpleNamespace

import torch

import grpo
from common.records import Completion, Group, Prompt
from packing import PackedBatch, pack
from rewards import vqa_reward


def check_advantages(its: ModuleType) -> None:
    """Compare with a group worked out by hand, equal rewards, and `grpo.group_advantages`."""
    close(
        its.advantages([1.0, 0.0, 0.0, 0.0]), [1.5, -0.5, -0.5, -0.5], "rewards 1 0 0 0: the mean is 1/4 and σ is 1/2"
    )
    got = its.advantages([0.3, 0.1 + 0.2, 0.3])  # 0.1 + 0.2 is 0.30000000000000004
    assert got == [0.0] * 3, f"equal rewards teach nothing, but 0.3, 0.1 + 0.2 and 0.3 gave {got}"
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(0))
    want = grpo.group_advantages(rewards[None])[0].tolist()
    close(its.advantages(rewards.tolist()), want, f"rewards {[round(reward, 2) for reward in rewards.tolist()]}")


def check_clip(its: ModuleType) -> None:
    """Compare the values with the full code's functions, and say which tokens still have a gradient."""
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, 0.1], requires_grad=True)
    old, advantage = torch.zeros(6), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    loss = its.token_loss(logp, old, old, advantage, 0.2, 0.0)
    cfg = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    want = -grpo.clipped_objective(logp, logp - old, advantage, None, cfg)[0]
    close(loss, want, f"with ratios {rounded(logp.exp())} and advantages {advantage.tolist()}, the loss")
    loss.sum().backward()
    learns = (logp.grad != 0).tolist()
    assert learns == [False, True, True, False, True, True], f"which tokens have a gradient: {learns}"
    ref = torch.tensor([0.0, 1.0, -1.0, 0.3, 0.0, 2.0])
    want = want + 0.1 * grpo.kl_estimate(logp, ref)
    close(its.token_loss(logp, old, ref, advantage, 0.2, 0.1), want, "with β = 0.1, the loss")


def check_packed(its: ModuleType) -> None:
    """Compare with the batch that `packing.pack` makes."""
    for prompt, lengths in ((4, [3, 2]), (3, [1, 5, 2])):
        batch = packed_group(prompt, lengths)
        got, want = its.positions(prompt, lengths), batch.position_ids[0].tolist()
        assert got == want, f"positions of a prompt of {prompt} and completions of {lengths}: {want}, not {got}"
        got, want = its.attends(prompt, lengths), attention_of(batch)
        assert got.shape == want.shape, f"attends: {tuple(want.shape)} booleans, not {tuple(got.shape)}"
        wrong = (got != want).nonzero()
        assert not len(wrong), f"prompt {prompt}, completions {lengths}: (row, column) {wrong[0].tolist()} is wrong"


def packed_group(prompt: int, lengths: list[int]) -> PackedBatch:
    """Return a packed group of a text prompt of `prompt` tokens and completions of `lengths`."""
    completions = [Completion(torch.arange(length), torch.zeros(length)) for length in lengths]
    return pack([Group(Prompt(torch.arange(prompt), list(range(prompt)), torch.arange(prompt)[None]), completions)])


def attention_of(batch: PackedBatch) -> torch.Tensor:
    """Return whether the packed token of a row attends to that of a column, as (T, T), read from the segments."""
    parts, length = batch.segments, batch.input_ids.shape[1]
    allowed = torch.zeros(length, length, dtype=torch.bool)
    queries, keys = torch.arange(length).split(parts.q_lens), parts.keys.source.split(parts.k_lens)
    for own, seen in zip(queries, keys):
        for i, query in enumerate(own):  # the last query sees the last key
            allowed[query, seen[: len(seen) - len(own) + i + 1]] = True
    return allowed


def check_importance(its: ModuleType) -> None:
    """Three answers: the sampler draws them as often as 2, 1, 1, the policy as 1, 1, 2. The last one earns 1."""
    sampler, policy = torch.tensor([0.5, 0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.25, 0.5])
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    for cap, want in ((10.0, 0.5), (1.5, 0.375), (1.0, 0.25)):
        got = its.expected_reward(policy.log(), sampler.log(), rewards, cap)
        close([got], [want], f"with a cap of {cap:g}, the expected reward")


def check_hacking(its: ModuleType) -> None:
    """A picture of a 1, and the question whether it is even; also other ways to cheat."""
    hack, honest = (f"<think>It looks like a {digit}.</think>\n<answer>no</answer>" for digit in (7, 1))
    assert vqa_reward(hack, "no") == vqa_reward(honest, "no") == 1
    cases = {hack: 0, honest: 1, honest.replace("no", "yes"): 0, "<answer>no</answer>": 0}
    cases |= {honest.replace("1", "1 or a 7"): 0, honest.replace("1", "17"): 0, honest.replace("1", "digit"): 0}
    for completion, want in cases.items():
        got = its.honest_reward(completion, "no", digit=1)
        assert got == want, f"{completion!r} for a picture of a 1 earned {got}, not {want}"


def close(got: object, want: object, what: str) -> None:
    """Raise AssertionError unless all numbers agree to 1e-4."""
    got, want = (torch.as_tensor(each).detach().float() for each in (got, want))
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-4), (
        f"{what}: {rounded(want)}, not {rounded(got)}"
    )


def rounded(values: torch.Tensor) -> list[float]:
    """Return values to print."""
    return [round(value, 4) for value in values.flatten().tolist()]


CHECKS = {
    1: ("advantages", check_advantages),
    2: ("clip", check_clip),
    3: ("packed", check_packed),
    4: ("importance", check_importance),
    5: ("hacking", check_hacking),
}


def check(number: int, folder: str = "exercises") -> str | None:
    """Return what is wrong with exercise `number`, or None."""
    name, its_check = CHECKS[number]
    try:
        its_check(importlib.import_module(f"lesson.{folder}.{name}"))
    except (AssertionError, NotImplementedError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, choices=CHECKS)
    parser.add_argument("--solution", action="store_true")
    given = parser.parse_args()
    problem = check(given.number, "solutions" if given.solution else "exercises")
    print(f"exercise {given.number}: {problem or 'right'}")
    raise SystemExit(bool(problem))
