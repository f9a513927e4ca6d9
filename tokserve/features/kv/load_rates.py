"""Whether stored KV blocks are faster loaded than computed, by what was measured of both.

Bytes per second are moving averages of the loads so far, from memory and from files; before the first load they are
assumed.  Tokens per second are those of the largest steps measured; before the first, everything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

MEMORY_RATE, FILE_RATE = 2e9, 200e6  # bytes per second, assumed
WEIGHT = 0.3  # of a new measurement in the moving average
AGAIN_SECONDS = 60.0  # after which files that were too slow are tried again
LEAST_PATIENCE, PATIENCE = 2.0, 3.0  # seconds that a load from files may take, and times the expected ones


class LoadRates:
    """`tokens_per_second`: of computing prompts; 0.0 while it is not known."""

    def __init__(self, block_bytes: int, block_size: int, tokens_per_second: Callable[[], float]) -> None:
        self._block_bytes, self._block_size = block_bytes, block_size
        self._tokens_per_second = tokens_per_second
        self.memory, self.files = MEMORY_RATE, FILE_RATE
        self._measured = 0.0  # when files were read last

    def seconds_from_files(self, num_blocks: int) -> float:
        """The time that reading `num_blocks` blocks from files takes."""
        return num_blocks * self._block_bytes / self.files

    def is_worthwhile(self, num_blocks: int, from_files: int, queued: int, now: float) -> bool:
        """Whether to load so many blocks, some of them from files, of which `queued` others are read before."""
        if from_files and now - self._measured > AGAIN_SECONDS:
            self.files = max(self.files, FILE_RATE)
        rate = self._tokens_per_second()
        if not rate:
            return True
        seconds = num_blocks * self._block_bytes / self.memory
        seconds += self.seconds_from_files(from_files + queued) if from_files else 0.0
        return seconds < num_blocks * self._block_size / rate

    def patience(self, from_files: int) -> float:
        """Seconds after which a load from files is given up."""
        return max(LEAST_PATIENCE, PATIENCE * self.seconds_from_files(from_files))

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """Record that `num_blocks` blocks came from memory in this time."""
        self.memory += WEIGHT * (num_blocks * self._block_bytes / max(seconds, 1e-6) - self.memory)

    def read(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record that `num_blocks` blocks came from files in this time, or would have."""
        self._measured = now
        self.files += WEIGHT * (num_blocks * self._block_bytes / max(seconds, 1e-6) - self.files)

    def timed_out(self, num_blocks: int, seconds: float, now: float) -> None:
        """Files were not read within the time: they are at best so fast."""
        self._measured = now
        self.files = min(self.files, num_blocks * self._block_bytes / max(seconds, 1e-6))
