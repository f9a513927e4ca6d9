"""NVIDIA's driver by ctypes: memory of a GPU that two processes share by a handle of 64 bytes (CUDA IPC).

Only the driver's library is needed: neither CUDA's runtime nor a torch that was built with it.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from .errors import WeightsError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # flag: the memory may be another GPU's


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class DeviceUuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetUuid_v2": [POINTER(DeviceUuid), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuMemcpy": [c_uint64, c_uint64, c_size_t],
    "cuIpcGetMemHandle": [POINTER(IpcHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
}


class CudaError(WeightsError):
    """A call of the driver failed, or there is no driver.  `name`: CUDA's for the error."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class CudaDriver:
    """The driver, and the GPUs that this process sees: their numbers, which are torch's too, by UUID.

    Raises CudaError if there is no driver, or no GPU.
    """

    def __init__(self, library: str) -> None:
        try:
            loaded = ctypes.CDLL(library)
            self._functions = {name: loaded[name] for name in SIGNATURES}
        except (OSError, AttributeError) as error:
            raise CudaError(f"CUDA IPC needs NVIDIA's driver: {error}") from None
        for name, types in SIGNATURES.items():
            self._functions[name].argtypes = types
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        self.devices = {self._uuid(number): number for number in range(count.value)}

    def _uuid(self, number: int) -> uuid.UUID:
        device, value = c_int(), DeviceUuid()
        self.call("cuDeviceGet", byref(device), number)
        self.call("cuDeviceGetUuid_v2", byref(value), device)
        return uuid.UUID(bytes=bytes(value.bytes))

    def uuid_of(self, number: int) -> uuid.UUID:
        """The UUID of a GPU by its number.  Raises CudaError if this process sees none with it."""
        for one, device in self.devices.items():
            if device == number:
                return one
        raise CudaError(f"there is no GPU {number}: this process sees {len(self.devices)}")

    def call(self, function: str, *args: Any) -> None:
        """Call a function of the driver.  Raises CudaError."""
        code = self._functions[function](*args)
        if code:
            name = c_char_p()
            self._functions["cuGetErrorName"](code, byref(name))
            shown = (name.value or b"an unknown error").decode()
            raise CudaError(f"{function}: {shown} ({code})", shown)


@functools.cache
def load_driver(library: str = LIBRARY) -> CudaDriver:
    """The driver; loaded once.  Raises CudaError."""
    return CudaDriver(library)


class DeviceContext:
    """The primary context of a GPU, which torch uses too, held until `close`; current only during a call.

    Addresses are integers.  All methods raise CudaError.
    """

    def __init__(self, driver: CudaDriver, number: int) -> None:
        self._driver = driver
        device, context = c_int(), c_void_p()
        driver.call("cuDeviceGet", byref(device), number)
        driver.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._device, self._context = device, context

    def close(self) -> None:
        """Let go of the context."""
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def allocate(self, num_bytes: int) -> int:
        """Memory that can be exported, which that of torch's allocator cannot always."""
        address = c_uint64()
        with self._current():
            self._driver.call("cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        with self._current():
            self._driver.call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The handle of allocated memory, for other processes."""
        handle = IpcHandle()
        with self._current():
            self._driver.call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map the memory of another process."""
        address, value = c_uint64(), IpcHandle.from_buffer_copy(handle)
        with self._current():
            self._driver.call("cuIpcOpenMemHandle_v2", byref(address), value, LAZY_PEER_ACCESS)
        return address.value

    def unmap(self, address: int) -> None:
        """Undo `open`."""
        with self._current():
            self._driver.call("cuIpcCloseMemHandle", address)

    def size_from(self, address: int) -> int:
        """The number of bytes from an address to the end of its allocation."""
        base, size = c_uint64(), c_size_t()
        with self._current():
            self._driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value + size.value - address

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes between any two of GPUs' and the host's memory; they are there when it returns."""
        with self._current():
            self._driver.call("cuMemcpy", target, source, num_bytes)
            self._driver.call("cuCtxSynchronize")
