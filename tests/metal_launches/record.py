"""Records what the host launches, without running a kernel: python -m tests.metal_launches.record OP... prints JSON.

Run it as a separate process, because the host caches the libraries that it loads for kernels, and here there are none.
"""

import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

import mlx_anvil
from mlx_anvil import _simulate
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.toolchain import PACKAGE, link_shared, require, run_tool
from tests.metal_launches.calls import CALLS


@dataclass
class Launch:
    op: str
    kernel: str
    constants: dict[int, bool]
    bindings: tuple[str, ...]  # as in mlx_anvil.trace
    threads: int
    for_matrix_units: bool  # only where a GPU has these, as Apple's do not


def build_recorder(folder: Path) -> ctypes.CDLL:
    library, compiled, source = folder / "recorder.so", folder / "recorder.o", Path(__file__).with_name("recorder.c")
    flags = ["-c", "-fPIC", "-O1", "-fno-sanitize=all", "-I", str(PACKAGE.parents[1]), "-o", str(compiled)]
    require(run_tool(["cc", *flags, str(source)]), "compiling recorder.c")
    link_shared([str(compiled)], library)  # by itself: `zig cc` would build its own runtime library first
    return ctypes.CDLL(str(library))


def record(op: str) -> list[Launch]:
    """The distinct launches of an op's calls, without those of other ops that it uses."""
    found = {}
    for call in CALLS[op]():
        for_matrix_units = getattr(call, "for_matrix_units", False)
        with mlx_anvil.trace() as trace:
            mx.eval(call())
        for event in trace.events:
            if event.op == op and not event.is_fallback:
                if event.reason:  # a kernel of MLX's
                    continue
                name, values = parse_key(event.kernel)
                x, y, z = event.threadgroup
                launch = Launch(op, name, values, event.bindings, x * y * z, for_matrix_units)
                if not for_matrix_units or (event.kernel, event.bindings) not in found:
                    found[event.kernel, event.bindings] = launch
    return list(found.values())


@contextmanager
def recording() -> Iterator[None]:
    """Inside the block launches run nothing. For the rest of the process there are no simulated kernels."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = build_recorder(Path(folder))

        def pretend_to_compile(op: str, kernel: str, *_: object) -> str:
            assert recorder.recorder_add(kernel.encode()), "recorder.c holds too few kernels"
            return recorder._name

        with mlx_anvil.simulate():
            _simulate._use_compiler(pretend_to_compile)
            yield


if __name__ == "__main__":
    with recording():
        launches = [launch for op in sys.argv[1:] for launch in record(op)]
    json.dump([asdict(launch) for launch in launches], sys.stdout)
