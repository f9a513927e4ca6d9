"""The trainer's half of the exactness contract: logprobs with gradients, equal to the server's to the bit.

    from tokserve.train import PolicyModel

Needs torch and the compiled ops; imports neither the server nor the engine.
"""

from tokserve.train.policy import PolicyModel

__all__ = ["PolicyModel"]
