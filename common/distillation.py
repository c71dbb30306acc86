"""On-policy distillation: a teacher's opinion of each sampled token, as a part of the token's advantage."""

from torch import Tensor


def with_teacher(advantages: Tensor, logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """Return A − (log π − log ν) for each token, with π the policy and ν the teacher. All tensors are (C,).

    With the added term, the policy gradient also follows −∇KL(π ‖ ν) at each prefix that the policy samples:

        KL   = Σ_v π(v) (log π(v) − log ν(v))                                   over the next tokens v
        ∇KL  = Σ_v ∇π(v) (log π(v) − log ν(v)) + Σ_v π(v) ∇log π(v)
             = Σ_v π(v) ∇log π(v) (log π(v) − log ν(v)) + ∇ Σ_v π(v)            with ∇π = π ∇log π
             = E_v[(log π(v) − log ν(v)) ∇log π(v)]                             as Σ_v π(v) = 1

    so the policy gradient of a token whose advantage is −(log π − log ν) is that of −KL, in expectation. What the token
    does to later prefixes is left out, as in GKD (arXiv:2306.13649) and MiniLLM's single-step part (arXiv:2306.08543).
    `logp` carries no gradient: it is the policy's before the update.
    """
    return advantages - (logp.detach() - teacher_logp)
