"""What only samplers need; `rollout.py` has the interface, the table of samplers and vLLM's.

Imports the packages and modules up to `data`. Start reading at `hf_engine.py`, the sampler without vLLM.
`vllm_start.py` starts vLLM inside the training process, `vllm_checks.py` compares its tokens, pixels and weights with
the trainer's, and `vllm_loop.py` can stop early (`continuation.py`).
"""
