"""Launches kernels of described PTX through the CUDA driver. Needs NumPy and libcuda.so.1, nothing else."""

from __future__ import annotations

import ctypes
import json
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import numpy as np


class Driver:
    """One context on the first GPU."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self.cuda, function)(*arguments)
        if status:
            text = c_char_p()
            self.cuda.cuGetErrorString(status, byref(text))
            raise RuntimeError(f"{function}: {text.value.decode() if text.value else status}")


class Module:
    """A PTX file and the description beside it."""

    def __init__(self, driver: Driver, path: Path):
        self.driver = driver
        self.kernels = {k["name"]: k for k in json.loads(path.with_suffix(".json").read_text())["kernels"]}
        log = ctypes.create_string_buffer(8192)
        # CU_JIT_ERROR_LOG_BUFFER and its size
        options, values = (c_int * 2)(5, 6), (c_void_p * 2)(ctypes.addressof(log), len(log))
        self.handle = c_void_p()
        try:
            driver.call("cuModuleLoadDataEx", byref(self.handle), path.read_bytes() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{path.name}: {error}: {log.value.decode()}") from None

    def run(
        self,
        kernel: str,
        buffers: dict[int, object],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        threadgroup: dict[int, int] | None = None,
    ) -> None:
        """Arrays are copied to the device and back; values are passed as bytes.

        `threadgroup` has the lengths of the buffers of dynamic threadgroup memory.
        """
        described = self.kernels[kernel]
        driver, function = self.driver, c_void_p()
        driver.call("cuModuleGetFunction", byref(function), self.handle, described["entry"].encode())
        offsets, length = {}, 0
        for index in described["threadgroup_buffers"]:
            offsets[index] = length
            length += -(-threadgroup[index] // 16) * 16
        arguments, arrays = [], []
        for parameter in described["parameters"]:
            index, kind = parameter["index"], parameter["kind"]
            if kind == "threadgroup_offset":
                arguments.append(c_uint(offsets[index]))
            elif kind == "value":
                data = np.asarray(buffers[index]).tobytes()
                assert len(data) == parameter["size"], f"{kernel}: {parameter['name']} has {parameter['size']} bytes"
                arguments.append(ctypes.create_string_buffer(data, len(data)))
            elif index in buffers:
                address, array = c_uint64(), buffers[index]
                driver.call("cuMemAlloc_v2", byref(address), c_size_t(max(array.nbytes, 16)))
                driver.call("cuMemcpyHtoD_v2", address, c_void_p(array.ctypes.data), c_size_t(array.nbytes))
                arrays.append((address, array))
                arguments.append(address)
            else:  # a buffer that a function constant switched off
                arguments.append(c_uint64(0))
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        sizes = [c_uint(n) for shape in (grid, block) for n in (*shape, 1, 1)[:3]]
        driver.call("cuLaunchKernel", function, *sizes, c_uint(length), None, pointers, None)
        driver.call("cuCtxSynchronize")
        for address, array in arrays:
            driver.call("cuMemcpyDtoH_v2", c_void_p(array.ctypes.data), address, c_size_t(array.nbytes))
            driver.call("cuMemFree_v2", address)
