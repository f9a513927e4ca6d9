"""The trainer's half of the exactness contract: logprobs with gradients, equal to the server's to the bit.

    from tokserve.train import PolicyModel, exact, selective_logprobs

`PolicyModel` loads a checkpoint; `exact` puts the same arithmetic under a transformers model, and `selective_logprobs`
makes the server's logprobs of its logits.  Needs torch and the compiled ops; imports neither the server nor the engine.
`tokserve.train.trl` is for TRL, which only it imports.
"""

from tokserve.train.exact_model import exact
from tokserve.train.policy import PolicyModel
from tokserve.train.selective import selective_logprobs

__all__ = ["PolicyModel", "exact", "selective_logprobs"]
