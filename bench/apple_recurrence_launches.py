"""What mlx-lm and MLX launch for recurrences, unchanged, for the simulator and the compiler of apple_recurrences.py.

mlx-lm's kernels are strings in its modules, which make them where Metal is available. Here a copy of such a module is
executed whose kernels only record how they are launched. MLX's own are of the headers of its wheel.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from math import ceil, prod
from types import ModuleType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

import estimate_launches as launches
from agx import _INCLUDE
from apple_launches import _block, _from_repository
from apple_mlx import Counted, times
from estimate_launches import _HEADERS, TYPES, _draw
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.agx import AgxKernel, compile_agx
from mlx_anvil.mslc.compiler import PROFILED
from mlx_anvil.mslc.estimate_work import Work, combine_work
from mlx_anvil.mslc.kernel_source import PRELUDE, InputInfo, generate
from mlx_anvil.mslc.simulator import Library
from mlx_source import metal_file

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Pass:
    """An op of MLX's of which only the bytes are counted, the least that it moves. That flatters MLX."""

    name: str
    read: float
    written: float


@dataclass
class Launch:
    """`sample` of the `grid` are simulated; both are in threadgroups."""

    source: Source
    function: str
    buffers: dict[int, Any]
    grid: Extent
    sample: Extent
    threadgroup: Extent
    constants: dict[int, object] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)  # bytes of the real arrays, where those here are smaller
    scale: float = 1  # launches of this kind

    def count(self) -> tuple[Work, AgxKernel]:
        library = Library(self.source, constants=self.constants, options=PROFILED)
        profile = library.run(self.function, self.buffers, self.sample, self.threadgroup).profile
        assert profile is not None
        (compiled,) = compile_agx(self.source, [self.function], self.constants)
        names = {p.index: p.name for p in library.kernels[self.function].parameters}
        limits = {names[i]: float(b.nbytes) for i, b in self.buffers.items() if isinstance(b, np.ndarray)}
        ratio = prod(self.grid) / prod(self.sample)
        work = combine_work(profile, compiled, prod(self.threadgroup), ratio, limits | self.sizes, laid_out=True)
        return times(Counted(work), self.scale).work, compiled


# ---- kernels of mlx-lm


@dataclass
class Recorder:
    """Stands for a kernel of `mx.fast.metal_kernel`."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    launch: Launch | None = None

    def __call__(
        self, *, inputs: Sequence[Any], template: Sequence[Any], grid: Extent, threadgroup: Extent,
        output_shapes: Sequence[Sequence[int]], output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:  # fmt: skip
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        generated = generate(
            self.name, "", self.source,
            list(zip([InputInfo.of(name, self.source) for name in self.input_names], arrays, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)), template, False,
        )  # fmt: skip
        source = Source(PRELUDE + generated.text, f"{self.name}.metal", (str(_INCLUDE),))
        groups = tuple(ceil(n / size) for n, size in zip(grid, threadgroup, strict=True))
        buffers = dict(enumerate(_memory(x) for x in (*arrays, *outputs)))
        self.launch = Launch(source, generated.name, buffers, groups, groups, threadgroup)  # type: ignore[arg-type]
        return outputs


def _memory(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


@cache
def _module(name: str) -> tuple[ModuleType, list[Recorder]]:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    assert spec
    assert spec.loader
    module, kernels = importlib.util.module_from_spec(spec), []

    def record(**given: Any) -> Recorder:
        kernels.append(Recorder(**given))
        return kernels[-1]

    with ExitStack() as stack:
        stack.enter_context(patch.object(mx.metal, "is_available", lambda: True))
        stack.enter_context(patch.object(mx.fast, "metal_kernel", record))
        spec.loader.exec_module(module)
    return module, kernels


def of_mlx_lm(module: str, call: Callable[[ModuleType], object], heads: int) -> Launch:
    """The launch of a call of a function of mlx-lm's; `heads` of it are simulated."""
    loaded, kernels = _module(module)
    for kernel in kernels:
        kernel.launch = None
    call(loaded)
    (launch,) = (kernel.launch for kernel in kernels if kernel.launch)
    launch.sample = (*launch.grid[:2], min(heads, launch.grid[2]))
    return launch


# ---- kernels of MLX


def _instance(header: str, function: str, arguments: Sequence[object], *before: str) -> Source:
    text = [f'#include "{_HEADERS}/{name}"' for name in ("utils.h", *before, header)]
    text.append(f'instantiate_kernel("{function}", {function}, {", ".join(map(str, arguments))})')
    return Source.load("\n".join(["#include <metal_stdlib>", *text]) + "\n", [_INCLUDE], {"MLX_METAL_JIT": 1})


def gated_delta_update(arrays: Sequence[mx.array], heads: int) -> Launch:
    """As the op of MLX dispatches up to 8 steps, and more of them on a GPU without matrix units of 16 bits."""
    q, k, v, g, beta, state = arrays
    length, key_heads, dim = q.shape[1:]
    value_heads, value_dim = v.shape[2:]
    function, last = ("gated_delta_fused_chunk", 8) if length > 8 else ("gated_delta_seq", 1)
    given = [_memory(x) for x in (q, k, v, state, g.astype(q.dtype), beta.astype(q.dtype))]
    buffers: dict[int, Any] = dict(enumerate([*given, np.zeros_like(given[2]), np.zeros_like(given[3]), length]))
    sizes = ("bfloat16_t", dim, value_dim, key_heads, value_heads, last)
    rows = value_dim // 32 if length > 8 else value_dim // 4
    return Launch(_instance("gated_delta_update.h", function, sizes), function, buffers, (1, rows, value_heads),
                  (1, rows, min(heads, value_heads)), (32, 4, 1), {200: False})  # fmt: skip


def _depthwise_source() -> Source:
    """The kernel alone: others of the file would be compiled with it."""
    text = metal_file("conv.metal")
    begin = text.rindex("template <", 0, text.index("void depthwise_conv_1d"))
    lines = ["#include <metal_stdlib>", f'#include "{_HEADERS}/utils.h"', "using namespace metal;"]
    lines += [text[begin : text.index("#define instantiate_depthconv1d")]]
    lines += ['instantiate_kernel("depthwise_conv_1d", depthwise_conv_1d, bfloat16_t, int32_t)']
    return Source.load("\n".join(lines) + "\n", [_INCLUDE], {"MLX_METAL_JIT": 1})


def depthwise_conv1d(rows: int, channels: int, width: int) -> Launch:
    """`mx.conv1d` of one group for each channel; one row of threadgroups is simulated."""
    wide, high = _block(channels, rows)
    part = min(rows, high)
    x, w = _draw((part + width - 1, channels), "bfloat16"), _draw((channels, width), "bfloat16")
    y = np.zeros((part, channels), TYPES["bfloat16"][1])
    strides = np.array([x.size, channels, 1], np.int32)
    grid, sample = ((channels // wide, ceil(n / high), 1) for n in (rows, part))
    sizes = {"in": (rows + width - 1) * channels * 2.0, "out": rows * channels * 2.0}
    return Launch(_depthwise_source(), "depthwise_conv_1d", {0: x, 1: w, 2: y, 3: strides, 4: width},
                  grid, sample, (wide, high, 1), {}, sizes)  # fmt: skip


def rms_norm(rows: int, columns: int) -> Launch:
    """Without a weight: the kernel reads one number."""
    x, one = _draw((rows, columns), "bfloat16"), np.array([0x3F80], np.uint16)
    buffers: dict[int, Any] = {0: x, 1: one, 2: np.zeros_like(x), 3: 1e-6, 4: columns, 5: 0}
    threads = ceil(columns / 4 / 32) * 32
    return Launch(_from_repository("rms_norm.metal"), "rmsbfloat16", buffers, (rows, 1, 1), (rows, 1, 1),
                  (threads, 1, 1), {20: False})  # fmt: skip


_SILU = """#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/unary_ops.h"
#include "mlx/backend/metal/kernels/binary_ops.h"
[[kernel]] void silu(const device bfloat16_t* x [[buffer(0)]], device bfloat16_t* out [[buffer(1)]],
                     constant const uint& size [[buffer(2)]], uint3 pos [[thread_position_in_grid]]) {
  uint index = 4 * pos.x;
  for (int i = 0; i < 4 && index < size; ++i) {
    bfloat16_t a = x[index];
    bfloat16_t b = Sigmoid()(a);
    out[index] = Multiply()(a, b);
    index++;
  }
}
"""


def silu(size: int) -> Launch:
    """As mx.compile writes it: one kernel, in bfloat16 all along; 8 threadgroups are simulated."""
    groups = size // 1024
    part = min(groups, 8)
    x = _draw((part * 1024,), "bfloat16")
    return Launch(Source.load(_SILU, [_INCLUDE], {"MLX_METAL_JIT": 1}), "silu",
                  {0: x, 1: np.zeros_like(x), 2: np.array(part * 1024, np.uint32)}, (groups, 1, 1), (part, 1, 1),
                  (256, 1, 1), {}, dict.fromkeys(("x", "out"), size * 2.0))  # fmt: skip


def sigmoid_product(size: int) -> list[Launch]:
    """`x * mx.sigmoid(gate)`: a kernel for each; 8 threadgroups are simulated."""
    each = 4 if size >= 1 << 16 else 1
    groups = ceil(size / each / 1024)
    part = min(groups, 8)
    x, gate = (_draw((part * 1024 * each,), "bfloat16") for _ in range(2))
    count, grid, sample = np.array(x.size, np.uint32), (groups, 1, 1), (part, 1, 1)
    unary = _instance("unary.h", "unary_v", ("bfloat16_t", "bfloat16_t", "Sigmoid", each), "unary_ops.h")
    binary = _instance("binary.h", "binary_vv", ("bfloat16_t", "bfloat16_t", "Multiply", each), "binary_ops.h")
    sizes = dict.fromkeys(("in", "out", "a", "b", "c"), size * 2.0)
    return [
        Launch(unary, "unary_v", {0: gate, 1: np.zeros_like(x), 2: count}, grid, sample, (1024, 1, 1), {}, sizes),
        Launch(
            binary, "binary_vv", {0: x, 1: gate, 2: np.zeros_like(x), 3: count}, grid, sample, (1024, 1, 1), {}, sizes
        ),
    ]


def ssm_attn(steps: int, heads: int, dim: int, states: int) -> list[Launch | Pass]:
    """mlx-lm's `ssm_attn`: for each 256 steps four products, and passes between them, mostly over [heads, 256, 256]."""
    part = 256
    parts, squares = steps // part, heads * part * part * 4
    x, b = heads * part * dim * 4, heads * part * states * 4
    # Of float32: the decays repeated, cut, summed up, their exponential, times C B, and cut; C B repeated, in bfloat16.
    between = Pass("between products", parts * 5.5 * squares, parts * 6.5 * squares)
    # dt x; its decayed copy; B repeated and widened; the two parts of y, scaled and added; y joined, with D x.
    rows = Pass("rows", parts * (7.5 * x + b / 2), parts * (5.5 * x + 1.5 * b))
    products = [
        launches.gemm(part, part, states, 1, "bfloat16", transposed=True),
        launches.gemm(part, dim, part, heads, "float32"),
        launches.gemm(dim, states, part, heads, "float32"),
        launches.gemv(dim, states, heads * part, "float32"),  # of the state: one for each step
    ]
    products[-1].sizes = {**products[-1].sizes, "mat": heads * dim * states * 4, "in_vec": part * states * 4}
    return [between, rows, *(_repeated(launch, parts) for launch in products)]


def _repeated(launch: launches.Launch, count: int) -> Launch:
    extents = [tuple(extent) for extent in (launch.grid, launch.sample, launch.threadgroup)]
    return Launch(launch.source(), launch.function, dict(launch.buffers), *extents, dict(launch.constants),
                  dict(launch.sizes), count)  # type: ignore[arg-type] # fmt: skip
