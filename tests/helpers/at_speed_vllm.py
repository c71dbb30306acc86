"""Run lesson/grpo_at_speed.py with a reward that differs between most completions of any model: its vowels.

torchrun --nproc_per_node 2 tests/helpers/vllm_cpu.py tests/helpers/at_speed_vllm.py --data ROWS.jsonl ...
"""

from lesson import grpo_at_speed


def vowels(completion: str, _: str) -> float:
    """Return the number of vowels, for 24 characters 1."""
    return sum(letter in "aeiou" for letter in completion) / 24


if __name__ == "__main__":
    grpo_at_speed.reward = vowels
    grpo_at_speed.main()
