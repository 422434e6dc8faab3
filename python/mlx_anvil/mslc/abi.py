"""ctypes declarations of runtime/abi.h."""

from __future__ import annotations

import ctypes as c

ABI_VERSION = 5
MAX_BUFFERS = 31
COUNT_KINDS = ("matrix_multiplies", "transcendentals")
DISPATCH_THREADS, CHECKED, PROFILED = 1, 2, 4
COUNTERS = ("threadgroups", "barriers", "collectives", "divergent_collectives", "threadgroup_memory")
FINDING_KINDS = (
    "none",
    "bad launch",
    "barrier divergence",
    "step limit",
    "threadgroup memory",
    "stack overflow",
    "collective divergence",
    "threadgroup race",
    "device race",
    "device out of bounds",
    "threadgroup out of bounds",
    "array out of bounds",
    "uninitialised threadgroup memory",
    "misaligned access",
    "arithmetic",
    "trap",
)


class Size(c.Structure):
    _fields_ = [("x", c.c_uint), ("y", c.c_uint), ("z", c.c_uint)]


class Parameter(c.Structure):
    _fields_ = [("name", c.c_char_p), ("type", c.c_char_p), ("kind", c.c_int), ("index", c.c_int)]


class Kernel(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("entry", c.c_void_p),
        ("parameters", c.POINTER(Parameter)),
        ("parameter_count", c.c_uint),
        ("max_threads", c.c_uint),
    ]


class Buffer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_ulonglong), ("offset", c.c_ulonglong)]


class ProfileSite(c.Structure):
    _fields_ = [
        ("pc", c.c_void_p),
        ("buffer", c.c_int),
        ("kind", c.c_int),
        ("accesses", c.c_ulonglong),
        ("lanes", c.c_ulonglong),
        ("bytes", c.c_ulonglong),
        ("transactions", c.c_ulonglong),
        ("ideal_transactions", c.c_ulonglong),
    ]


class Profile(c.Structure):
    _fields_ = [
        ("sites", c.POINTER(ProfileSite)),
        ("site_count", c.c_uint),
        ("reserved", c.c_uint),
        ("bytes_read", c.c_ulonglong * MAX_BUFFERS),
        ("bytes_written", c.c_ulonglong * MAX_BUFFERS),
        ("counts", c.c_ulonglong * len(COUNT_KINDS)),
        ("collective_lanes", c.c_ulonglong),
        ("bytes_of_threadgroups", c.c_ulonglong * MAX_BUFFERS),
    ]


class Launch(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint),
        ("flags", c.c_uint),
        ("kernel", c.POINTER(Kernel)),
        ("buffers", c.POINTER(Buffer)),
        ("buffer_count", c.c_uint),
        ("threadgroup_buffer_count", c.c_uint),
        ("threadgroup_lengths", c.POINTER(c.c_uint)),
        ("grid", Size),
        ("threadgroup_size", Size),
        ("seed", c.c_ulonglong),
        ("threads", c.c_uint),
        ("threadgroup_memory_limit", c.c_uint),
        ("step_limit", c.c_ulonglong),
        ("profile", c.POINTER(Profile)),
    ]


class Finding(c.Structure):
    _fields_ = [
        ("kind", c.c_int),
        ("count", c.c_uint),
        ("kernel", c.c_char_p),
        ("file", c.c_char_p),
        ("line", c.c_uint),
        ("column", c.c_uint),
        ("pc", c.c_void_p),
        ("threadgroup_position", Size),
        ("thread_index", c.c_int),
        ("other_thread", c.c_int),
        ("buffer", c.c_int),
        ("offset", c.c_longlong),
        ("size", c.c_uint),
        ("message", c.c_char * 240),
        ("other_pc", c.c_void_p),
    ]


class Report(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint),
        ("failed", c.c_uint),
        ("findings", c.POINTER(Finding)),
        ("finding_count", c.c_uint),
        ("finding_capacity", c.c_uint),
        *((name, c.c_ulonglong) for name in COUNTERS),
    ]


def declare_functions(library: c.CDLL) -> None:
    """Sets the signatures of the runtime's functions. `library` is any library linked with the runtime."""
    library.mslc_kernels.restype = c.POINTER(Kernel)
    library.mslc_kernels.argtypes = [c.POINTER(c.c_uint)]
    library.mslc_run.restype = c.c_int
    library.mslc_run.argtypes = [c.POINTER(Launch), c.POINTER(Report)]
    library.mslc_report_clear.restype = None
    library.mslc_report_clear.argtypes = [c.POINTER(Report)]
    library.mslc_profile_clear.restype = None
    library.mslc_profile_clear.argtypes = [c.POINTER(Profile)]
    library.mslc_abi_version.restype = c.c_uint
    version = library.mslc_abi_version()
    if version != ABI_VERSION:
        raise RuntimeError(f"the simulator runtime has ABI version {version}, this package expects {ABI_VERSION}")
