"""Machine code on a device: loading modules, checking what a wrapper is given, launching.

Every kernel takes one argument, a C struct by value, mirrored by a ctypes.Structure here: widths cannot go wrong, and
the struct's size is compiled into the kernel as ARGS_BYTES, where a static_assert holds it against the C side.
"""

import ctypes
from pathlib import Path
from typing import Any

import cupy as cp
from cuda.bindings import driver

from engine.ops.cuda.compile import Unit, compile_unit
from engine.ops.cuda.split import Limits

Array = Any
"""cupy.ndarray; CuPy has no types."""
Dim = tuple[int, int, int]

_DEFAULT_SHARED = 47 << 10
"""48 KiB need no permission, less what a kernel declares itself (barriers)."""


class Pointer(ctypes.c_void_p):
    """A device address inside an argument struct."""


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self._function = function
        self._shared = _DEFAULT_SHARED
        local = _ok(driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
        assert local == 0, f"{name} uses {local} bytes of local memory"

    def allow_shared(self, size: int) -> None:
        """Permit launches with `size` bytes of dynamic shared memory; done at load, not per launch."""
        if size > self._shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ok(driver.cuFuncSetAttribute(self._function, attribute, size))
            self._shared = size

    def resident(self, threads: int, shared: int) -> int:
        """Blocks of this size that one multiprocessor holds at a time."""
        found = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared)
        return max(1, int(_ok(found)))

    def launch(self, grid: Dim, threads: int, args: ctypes.Structure, stream: Any, shared: int = 0) -> None:
        """Queue on `stream`, free to start while the kernel before it there still runs (it waits itself)."""
        assert shared <= self._shared, f"{self.name}: {shared} bytes of shared memory were not allowed for"
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream.ptr
        config.attrs, config.numAttrs = [_early_start()], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        _ok(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


class Kernels:
    """All modules of one device. After `freeze` nothing is compiled or loaded any more."""

    def __init__(self, device: int, cache_dir: Path | None) -> None:
        self.device = device
        self.cache_dir = cache_dir
        major, minor = (int(cp.cuda.Device(device).compute_capability[i:j]) for i, j in ((0, -1), (-1, None)))
        self.arch = major * 10 + minor
        attributes = cp.cuda.Device(device).attributes
        names = "MultiProcessorCount", "MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor"
        self.limits = Limits(*(int(attributes[name]) for name in names))
        self._modules: dict[Unit, dict[str, Kernel]] = {}
        self._frozen = False

    def load(self, unit: Unit) -> dict[str, Kernel]:
        """Kernels of `unit` by name. Raises CompileError, or RuntimeError after `freeze`."""
        if unit not in self._modules:
            if self._frozen:
                raise RuntimeError(f"kernel module {unit} was not loaded before ready")
            compiled = compile_unit(unit, self.arch, self.cache_dir)
            with cp.cuda.Device(self.device):
                cp.cuda.runtime.free(0)  # the primary context exists and is current
                module = _ok(driver.cuModuleLoadData(compiled.cubin))
                self._modules[unit] = {
                    name: Kernel(name, _ok(driver.cuModuleGetFunction(module, name.encode())))
                    for name in compiled.kernels
                }
        return self._modules[unit]

    def freeze(self) -> None:
        self._frozen = True


def address(array: Array, dtype: str, shape: tuple[int | None, ...], name: str) -> Pointer:
    """Device address of `array` after a check of type, shape (None: any) and contiguity. Raises ValueError."""
    if array.dtype != dtype or array.ndim != len(shape) or not array.flags.c_contiguous:
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)} is not a contiguous {dtype}{list(shape)}")
    if any(want is not None and have != want for have, want in zip(array.shape, shape, strict=True)):
        raise ValueError(f"{name}: shape {list(array.shape)} is not {list(shape)}")
    return Pointer(array.data.ptr)


def rows_of(array: Array, dtype: str, rows: int | None, width: int, name: str) -> tuple[Pointer, int]:
    """Address and row stride, in elements, of a matrix with at least `width` columns; rows may lie apart (a slice of
    columns). Raises ValueError."""
    size = array.dtype.itemsize
    if array.dtype != dtype or array.ndim != 2 or array.strides[1] != size or array.strides[0] % size:
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)} is not a matrix of {dtype} with whole rows")
    if (rows is not None and array.shape[0] != rows) or array.shape[1] < width:
        raise ValueError(f"{name}: shape {list(array.shape)} does not hold {rows} rows of {width}")
    return Pointer(array.data.ptr), array.strides[0] // size


def optional(array: Array | None, dtype: str, shape: tuple[int | None, ...], name: str) -> Pointer:
    """As `address`; a null pointer for None."""
    return Pointer(None) if array is None else address(array, dtype, shape, name)


def _early_start() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _ok(answer: tuple[Any, ...]) -> Any:
    code = answer[0]
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(code)[1].decode()} ({code.name})")
    return answer[1] if len(answer) > 1 else None
