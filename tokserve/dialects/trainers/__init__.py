"""Routes that single training frameworks add to vLLM's, as thin translations over the engine calls of `admin`.

docs/rl.md lists them, with those that are refused and why.
"""
