"""Importing this file imports numpy with one thread, for the main modules of processes of ours: import it first.

numpy's OpenBLAS starts a thread for every other processor, and each spins for a tenth of a second; none of these
processes has large products of numpy.  torch's BLAS may read the same variable, so it is set for this import alone.
"""

import os

VARIABLE = "OPENBLAS_NUM_THREADS"

if VARIABLE in os.environ:
    import numpy
else:
    os.environ[VARIABLE] = "1"
    import numpy  # noqa: F401

    del os.environ[VARIABLE]
