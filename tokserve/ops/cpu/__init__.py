"""The CPU side of the ops: the compiled implementations, capture and replay, and the memory of packed weights.

`kernels` registers the implementations and needs the compiled extension; `capture` and `arena` load without it.
"""
