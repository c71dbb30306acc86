"""Let verl sample completions of the lengths of W-tail; apps/bench/peer_verl.py names `LogNormalLengths` to verl."""

from typing import Any

from lengths import log_normal_length
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class LogNormalLengths(SingleTurnAgentLoop):
    """verl's single-turn loop, with a maximum length for each completion. Together with `ignore_eos`, it is reached."""

    def __init__(self, *args, median: float, sigma: float, cap: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.distribution = median, sigma, cap

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        key = kwargs["index"], kwargs["session_id"]
        limit = {"max_tokens": log_normal_length(key, *self.distribution)}
        return await super().run(sampling_params | limit, **kwargs)
