"""The CUDA driver, opened at run time: the calls that tierstore makes, with errors that have names."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import NoReturn, Protocol

from tierstore.errors import GpuError

LIBRARY = "libcuda.so.1"
OLDEST = 12_000
"""The oldest driver, as ``cuDriverGetVersion`` tells it: CUDA 12.0."""
OUT_OF_MEMORY, NOT_READY = 2, 600
REFUSED_IMAGES = (200, 209, 218, 222)
"""Errors of a driver that has no use for an image: of another GPU or another CUDA."""


class MemoryLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("windows", c_void_p),
        ("flags", c_uint64),
    )


class AccessDescription(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", c_int))


_OUT, _INT_OUT = POINTER(c_void_p), POINTER(c_int)
_ADDRESS_OUT, _SIZE_OUT = POINTER(c_uint64), POINTER(c_size_t)
_FUNCTIONS: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [_INT_OUT],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGetCount": [_INT_OUT],
    "cuDeviceGet": [_INT_OUT, c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [_INT_OUT, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [_OUT, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [_OUT],
    "cuCtxGetStreamPriorityRange": [_INT_OUT, _INT_OUT],
    "cuMemGetInfo_v2": [_SIZE_OUT, _SIZE_OUT],
    "cuMemAlloc_v2": [_ADDRESS_OUT, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemAllocManaged": [_ADDRESS_OUT, c_size_t, c_uint],
    "cuMemAdvise": [c_uint64, c_size_t, c_int, c_int],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostAlloc": [_OUT, c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemGetAllocationGranularity": [_SIZE_OUT, POINTER(AllocationProperties), c_int],
    "cuMemAddressReserve": [_ADDRESS_OUT, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [_ADDRESS_OUT, c_size_t, POINTER(AllocationProperties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(AccessDescription), c_size_t],
    "cuStreamCreateWithPriority": [_OUT, c_uint, c_int],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, _INT_OUT],
    "cuThreadExchangeStreamCaptureMode": [_INT_OUT],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [_OUT, c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuModuleLoadData": [_OUT, c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [_OUT, c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p],
}


class _Function(Protocol):
    argtypes: list[type]
    restype: type

    def __call__(self, *args: object) -> int: ...


class CallError(GpuError):
    """A call of the driver failed with ``code``."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.code)


class _Codes(dict[int, int]):
    """Codes of a call that did not fail; to ask for another one raises ``CallError``."""

    def __init__(self, driver: Driver, name: str) -> None:
        super().__init__({0: 0})
        self._driver, self._name = driver, name

    def __missing__(self, code: int) -> NoReturn:
        self._driver.fail(self._name, code)


class Driver:
    """The driver's functions. Every method may raise ``CallError``.

    Raises ``GpuError`` where there is no driver, or one that is too old.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library
        try:
            self._library = ctypes.CDLL(library)
        except OSError as missing:
            raise GpuError(
                f"no NVIDIA driver is here: {missing}. Install the driver of the GPU, or start the container "
                "with --gpus all"
            ) from None
        version = c_int()
        self._function("cuDriverGetVersion")(byref(version))
        self.version = version.value
        """1000 times the major version of CUDA that the driver is for, and 10 times the minor."""
        if self.version < OLDEST:
            raise GpuError(
                f"the NVIDIA driver is for CUDA {self._text(self.version)}, and tierstore needs one for CUDA "
                f"{self._text(OLDEST)} or later. Install a newer driver"
            )
        for name, types in _FUNCTIONS.items():
            function = self._function(name)
            function.argtypes, function.restype = types, c_int

    def _function(self, name: str) -> _Function:
        try:
            function: _Function = getattr(self._library, name)
            return function
        except AttributeError:
            raise GpuError(
                f"{self._name} lacks {name}, so it is no NVIDIA driver for CUDA "
                f"{self._text(OLDEST)} or later. Install a newer driver"
            ) from None

    @staticmethod
    def _text(version: int) -> str:
        return f"{version // 1000}.{version % 1000 // 10}"

    def call(self, name: str, *args: object, what: str = "") -> None:
        """Call a function of the driver. ``what``: more about the call, for its error."""
        code = getattr(self._library, name)(*args)
        if code:
            self.fail(name + what, code)

    def ready(self, name: str, *args: object, what: str = "") -> partial[int]:
        """Return the call as one of native functions alone, so that Python runs no signal handler in it
        unless it fails."""
        function = partial(getattr(self._library, name), *args)
        checked = map(_Codes(self, name + what).__getitem__, map(partial.__call__, [function]))
        return partial(next, checked)

    def fail(self, name: str, code: int) -> NoReturn:
        """Raise what a call that returned ``code`` means."""
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        error = text.value.decode() if text.value else f"error {code}"
        raise CallError(f"{name} failed in the NVIDIA driver: {error}", code)

    def is_done(self, event: int) -> bool:
        """Return whether all that the event marks is done."""
        code: int = self._library.cuEventQuery(event)
        if code not in (0, NOT_READY):
            self.fail("cuEventQuery", code)
        return code == 0

    def handle(self, name: str, *args: object) -> int:
        """Return the handle that a function writes to its first argument."""
        made = c_void_p()
        self.call(name, byref(made), *args)
        return made.value or 0

    def address(self, name: str, *args: object) -> int:
        """Return the address, or number, that a function writes to its first argument."""
        made = c_uint64()
        self.call(name, byref(made), *args)
        return made.value

    def number(self, name: str, *args: object) -> int:
        """Return the int that a function writes to its first argument."""
        made = c_int()
        self.call(name, byref(made), *args)
        return made.value

    def exchange_capture_mode(self, mode: c_int) -> None:
        """Give this thread a mode of stream capture, and ``mode`` the one that it had. An error is that of an
        earlier kernel, which other calls name."""
        self._library.cuThreadExchangeStreamCaptureMode(byref(mode))

    def is_capturing(self, stream: int) -> bool:
        """Return whether a CUDA graph is being made of what the stream is given."""
        status = c_int()
        self.call("cuStreamIsCapturing", stream, byref(status))
        return status.value != 0

    def open_device(self, index: int) -> int:
        """Return the device number ``index``. Raises ``GpuError`` if there is none."""
        try:
            self.call("cuInit", 0)
            count = self.number("cuDeviceGetCount")
        except CallError as refused:
            raise GpuError(
                f"no GPU can be used: {refused}. nvidia-smi shows what the driver sees; CUDA_VISIBLE_DEVICES "
                f"is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
            ) from None
        if not 0 <= index < count:
            raise GpuError(
                f"there is no GPU number {index}: the driver shows {count}. CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
            )
        return self.number("cuDeviceGet", index)

    def memory(self) -> tuple[int, int]:
        """Return the free bytes of the current context's GPU, and all of its bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value
