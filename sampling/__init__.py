"""The samplers; `rollout.py` has their interface and their table.

Imports the packages and modules up to `data`. Start reading at `hf_engine.py`, the sampler without vLLM. In
`vllm_engine.py` is vLLM's, which `vllm_start.py` starts inside the training process; `vllm_loop.py` runs its requests,
and `vllm_checks.py` compares its tokens, pixels and weights with the trainer's.
"""
