"""Compiling a server's kernels for a GPU that this machine does not have: `tokserve compile`."""
