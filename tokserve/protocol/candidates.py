"""Candidates of prompt tokens: the ids whose logprobs a request wants at each position that it scores.

A request names them as a list of ids for all positions, as a list of ids for each, or as the bytes of an `.npy` array
of int32, [K] or [rows, K].  The engine has them as such bytes.  A row that is shorter than the longest ends in
`NO_CANDIDATE`s.
"""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import RequestError

Int32 = NDArray[np.int32]
NO_CANDIDATE = -1
MAX_CANDIDATES = 1024  # of a position
FIELD = "prompt_logprob_token_ids"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

Candidates = list[int | list[int]] | bytes


def candidate_rows(candidates: Candidates) -> Int32:
    """The ids, [K] for all positions alike, else [rows, K].  Raises RequestError."""
    rows = _unpacked(candidates) if isinstance(candidates, bytes) else _listed(candidates)
    width = rows.shape[-1]
    if width > MAX_CANDIDATES:
        raise _invalid(f"must have at most {MAX_CANDIDATES} ids for a position, got {width}")
    if rows.size and rows.min() < NO_CANDIDATE:
        raise _invalid(f"must have ids from 0 on, or {NO_CANDIDATE} for none, got {rows.min()}")
    return rows


def pack_array(array: NDArray[np.generic]) -> bytes:
    """The bytes of an `.npy` file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return file.getvalue()


def unpack_array(packed: bytes) -> NDArray[np.generic]:
    """The array of an `.npy` file in C order, which is not copied.  Raises ValueError for anything else."""
    file = io.BytesIO(packed)
    try:
        read_header = _HEADERS[np.lib.format.read_magic(file)]
        shape, is_fortran, dtype = read_header(file)
        data = memoryview(packed)[file.tell() :]
        if is_fortran or dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("not an array in C order, of its size")
        return np.frombuffer(data, dtype).reshape(shape)
    except (KeyError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _unpacked(packed: bytes) -> Int32:
    try:
        array = unpack_array(packed)
    except ValueError:
        raise _invalid("must be lists of ids, or the bytes of an .npy array in C order") from None
    if array.dtype != np.int32 or array.ndim not in (1, 2):
        raise _invalid(f"must be an array of int32 [K] or [rows, K], got {array.dtype} {list(array.shape)}")
    return array.view(np.int32)


def _listed(candidates: list[int | list[int]]) -> Int32:
    rows = [row for row in candidates if isinstance(row, list)]
    if rows and len(rows) < len(candidates):
        raise _invalid("must be a list of ids, or of lists of ids, not both")
    try:
        if candidates and not rows:
            return np.array(candidates, np.int32)
        widths = np.array([len(row) for row in rows], np.int64)
        filled = np.full((len(rows), widths.max(initial=0)), NO_CANDIDATE, np.int32)
        filled[np.arange(filled.shape[1]) < widths[:, None]] = [token for row in rows for token in row]
    except OverflowError:
        raise _invalid("must have ids of 32 bits") from None
    return filled


def _invalid(what: str) -> RequestError:
    return RequestError(f"{FIELD} {what}", field=FIELD)
