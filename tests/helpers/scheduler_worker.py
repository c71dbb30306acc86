"""Sample completions in vLLM with its own scheduler, or with parts/fast/fast_decode.py, and write them to a JSON file.

    python tests/helpers/scheduler_worker.py MODEL OUT.json [--own | --eager]

With `--eager`, waiting requests start as soon as in vLLM, so that both run the same requests in each iteration.

In the first round there are more requests than may run at once, and fewer blocks in the KV cache than these need. In
the second, all requests run at once and reach their maximum lengths one after the other.
"""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import vllm

from parts.fast.fast_decode import DecodeScheduler


class EagerScheduler(DecodeScheduler):
    def _admits_more(self) -> bool:
        running, waiting = self.get_request_counts()
        return waiting > 0 and running < self.max_num_running_reqs


def main(model: str, out: str, flag: str = "") -> None:
    options = {"scheduler_cls": {"--own": DecodeScheduler, "--eager": EagerScheduler}[flag]} if flag else {}
    llm = vllm.LLM(
        model,
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=24,
        gpu_memory_utilization=0.1,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        seed=0,
        **options,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    counts = {"_preempt_request": 0, "_schedule_decode": 0, "schedule": 0}

    def count(name):
        function = getattr(scheduler, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        setattr(scheduler, name, counted)

    for name in counts:
        if hasattr(scheduler, name):
            count(name)

    def sample(prompts, completions, max_tokens, stop):
        """Return the completions of the prompts, and how often the scheduler was called."""
        before = dict(counts)
        requests = [{"prompt_token_ids": [10 + (i + j) % 200 for j in range(n)]} for i, n in enumerate(prompts)]
        params = [
            vllm.SamplingParams(
                n=completions,
                seed=i,
                max_tokens=tokens,
                ignore_eos=True,
                stop_token_ids=stop,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for i, tokens in enumerate(max_tokens)
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        sampled = [completion for output in outputs for completion in output.outputs]
        results = [[list(c.token_ids), c.logprobs.logprobs, c.finish_reason, c.stop_reason] for c in sampled]
        return {"completions": results, "calls": {name: counts[name] - before[name] for name in counts}}

    crowded = sample([5 + 7 * i for i in range(12)], 4, [20 * (1 + i % 10) for i in range(12)], [4, 5])
    roomy = sample([5] * 8, 1, [10 * (1 + i) for i in range(8)], [])
    pathlib.Path(out).write_text(json.dumps({"crowded": crowded, "roomy": roomy}))


if __name__ == "__main__":
    main(*sys.argv[1:])
