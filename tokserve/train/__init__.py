"""The trainer's half of the exactness contract: logprobs with gradients, equal to the server's to the bit.

    from tokserve.train import PolicyModel, candidate_kl, exact, selective_logprobs

`PolicyModel` loads a checkpoint; `exact` puts the same arithmetic under a transformers model, and `selective_logprobs`
makes the server's logprobs of its logits.  `candidate_kl` is a loss against a teacher's scores of candidates.  Needs
torch and the compiled ops; imports neither the server nor the engine.  `tokserve.train.trl` is for TRL, which only it
imports.
"""

from tokserve.train.distillation import candidate_kl, candidate_logprobs
from tokserve.train.exact_model import exact
from tokserve.train.policy import PolicyModel
from tokserve.train.selective import selective_logprobs

__all__ = ["PolicyModel", "candidate_kl", "candidate_logprobs", "exact", "selective_logprobs"]
