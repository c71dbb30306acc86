"""What only samplers need; `rollout.py` has the interface, the table of samplers and vLLM's.

Imports the packages and modules up to `data`. Start reading at `hf_engine.py`, the sampler without vLLM.
`vllm_start.py` starts vLLM inside the training process, `vllm_worker.py` gives it the trainer's weights,
`vllm_checks.py` compares what it makes of a prompt with the trainer's, `vllm_logprobs.py` keeps log-probabilities
exact, `vllm_loop.py` can stop early (`continuation.py`), and `fast_decode.py` is an optional, faster scheduler.
"""
