"""What the kernels need as machine code of an Apple GPU, beside MLX's kernels for the same work:

    tools/agx/build.sh                  # once
    python bench/agx.py

writes bench/results/agx.json; ``python bench/plot.py`` draws it. Nothing is run: the counts are of code that Mesa's
compiler makes for an M1 or M2 (docs/apple.md). A row is a kernel with the function constants that language models
launch it with (tests/metal_launches/models.py). ``mlx`` is MLX's kernel of the installed wheel, unchanged, through the
same compiler.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RESULTS, console_table, write_results

import click
import mlx
from rich.console import Console

from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.agx import AgxKernel, compile_agx, kernel_names

ROOT = RESULTS.parent.parent
MLX_TYPES = {"float16": "half", "bfloat16": "bfloat16_t"}
_INCLUDE = Path(next(iter(mlx.__path__))) / "include"
_HEADERS = "mlx/backend/metal/kernels"
_VECTOR = dict.fromkeys(range(20, 26), False) | {26: 32}


@dataclass(frozen=True)
class Theirs:
    """An instance of a kernel template of MLX's headers."""

    headers: tuple[str, ...]
    function: str
    arguments: tuple[object, ...]  # after the type
    constants: Mapping[int, object]

    def compile(self, dtype: str) -> AgxKernel:
        lines = ["#include <metal_stdlib>"]
        lines += [f'#include "{_HEADERS}/{header}"' for header in ("utils.h", *self.headers)]
        arguments = ", ".join(map(str, (MLX_TYPES[dtype], *self.arguments)))
        lines.append(f'instantiate_kernel("{self.function}", {self.function}, {arguments})')
        source = Source.load("\n".join(lines) + "\n", [_INCLUDE], {"MLX_METAL_JIT": 1})
        return compile_agx(source, [self.function], self.constants)[0]


def _attention(dim: int, keys: int) -> Theirs:
    """Causal, of lengths that are multiples of the tile, as MLX prefers."""
    constants = {200: True, 201: True, 300: False, 301: True, 302: False, 303: False}
    arguments = (32, keys, dim, dim, 4, 1, "bool", "float")
    return Theirs(("steel/attn/kernels/steel_attention.h",), "attention", arguments, constants)


def _decode(dim: int, function: str = "sdpa_vector") -> Theirs:
    return Theirs(("sdpa_vector.h",), function, (dim, dim), _VECTOR)


def _product(function: str, bits: int, *more: str) -> Theirs:
    headers = ("steel/utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
    return Theirs(headers, function, (64, bits, *more), {200: True, 201: True, 202: True} if "rhs" in function else {})


# What is compared: our pipeline key, with {dtype} in it, and MLX's kernel.
_FORWARD = "flash_attention/flash_attention_forward_{{dtype}}_d{0}v{0}_c0t_c1f_c2f_c3f_c4f_c5t_c6f_c9f_c10t_c11f_c12f"
_DECODE = "flash_attention/flash_attention_decode_{{dtype}}_d{0}r2_c0f_c1f_c2f_c3f_c4f_c5t_c6f_c10t_c11f_c12f_c13f_c15f_c16{1}"
_GEMV = "quantized_matmul/quantized_gemv_{{dtype}}_affine{0}_r1_c0t_c1f"
_GEMM = "quantized_matmul/quantized_tiles_{1}_{{dtype}}_affine{0}{2}_c0t_c3t_c5t"
_GATHERED = "gather_matmul/gather_{1}_{{dtype}}_affine{0}_c0t{2}_c3t_c5t_c6{3}_c7t_c8f"
_TILE = ("16", "32", "32", "1", "2")  # rows of x and of w, columns; simdgroups
PAIRS = {
    "attention, causal, head_dim 64": (_FORWARD.format(64), _attention(64, 32)),
    "attention, causal, head_dim 128": (_FORWARD.format(128), _attention(128, 16)),
    "decode, head_dim 64": (_DECODE.format(64, "f"), _decode(64)),
    "decode, head_dim 128": (_DECODE.format(128, "f"), _decode(128)),
    "decode, head_dim 256": (_DECODE.format(256, "f"), _decode(256)),
    "decode in parts, head_dim 128": (_DECODE.format(128, "t"), _decode(128, "sdpa_vector_2pass_1")),
    "product, 1 row, 4 bits": (_GEMV.format(4), _product("affine_qmv_fast", 4, "false")),
    "product, 1 row, 8 bits": (_GEMV.format(8), _product("affine_qmv_fast", 8, "false")),
    "product, 16 rows, 4 bits": (_GEMM.format(4, "few", "_r16"), _product("affine_qmm_t", 4, "true", "false")),
    "product, 32 rows, 4 bits": (_GEMM.format(4, "few", "_r32"), _product("affine_qmm_t", 4, "true", "false")),
    "product, prefill, 4 bits": (_GEMM.format(4, "transposed", ""), _product("affine_qmm_t", 4, "true", "false")),
    "product, prefill, 8 bits": (_GEMM.format(8, "transposed", ""), _product("affine_qmm_t", 8, "true", "false")),
    "its gradient in x, 4 bits": (_GEMM.format(4, "plain", ""), _product("affine_qmm_n", 4, "false")),
    **{
        f"experts, {what}, {bits} bits": (_GATHERED.format(bits, kernel, *constants), _product(mlx, bits, *more))
        for what, kernel, constants, mlx, more in (
            ("1 row", "few", ("_c1f", "f"), "affine_gather_qmv_fast", ()),
            ("few rows", "few", ("_c1f", "t"), "affine_gather_qmm_rhs", (*_TILE, "true")),
            ("prefill", "tiles_transposed", ("", "t"), "affine_gather_qmm_rhs", (*_TILE, "true")),
            ("gradient in x", "tiles_plain", ("", "t"), "affine_gather_qmm_rhs", (*_TILE, "false")),
        )
        for bits in (4, 8)
    },
}


def launched() -> list[str]:
    """Pipeline keys, as op/kernel with its function constants."""
    command = [sys.executable, "-m", "tests.metal_launches.models", "--apple"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.split()


def sources() -> dict[str, Source]:
    """The source of every kernel of the project."""
    found = {}
    for path in sorted((ROOT / "metal").glob("*/*.metal")):
        source = Source.load(path, [ROOT])
        found |= dict.fromkeys(kernel_names(source), source)
    return found


def _needs(kernel: AgxKernel) -> dict[str, Any]:
    numbers = kernel.to_json()
    return {name: value for name, value in numbers.items() if name not in ("name", "classes")} | {
        "classes": {name: count for name, count in kernel.classes.items() if count}
    }


@click.command()
@click.option("--only", default="", help="Part of a pipeline key: prints these kernels and writes nothing.")
def main(only: str) -> None:
    keys = [key for key in launched() if only in key]
    where = sources()
    compared = {
        ours.format(dtype=dtype): (what, dtype, mlx) for what, (ours, mlx) in PAIRS.items() for dtype in MLX_TYPES
    }
    missing = compared.keys() - set(keys)
    if missing and not only:
        sys.exit(f"models do not launch {', '.join(sorted(missing))}: PAIRS names another specialisation")

    def row(key: str) -> dict[str, Any]:
        op, name = key.split("/")
        kernel, constants = parse_key(name)
        result: dict[str, Any] = {
            "op": op,
            "key": name,
            "ours": _needs(compile_agx(where[kernel], [kernel], constants)[0]),
        }
        if key in compared:
            what, dtype, mlx = compared[key]
            result |= {"what": what, "dtype": dtype, "mlx_kernel": mlx.function, "mlx": _needs(mlx.compile(dtype))}
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(row, keys))
    if not only:
        click.echo(write_results("agx", rows, compiler="Mesa's AGX compiler (M1, M2); nothing was run"))
    table = console_table("AGX", words=("kernel",), figures=("instructions", "registers", "threads", "spills:fills"))
    for found in rows:
        for who in ("ours", "mlx"):
            if who in found:
                counts = found[who]
                label = found["key"] if who == "ours" else f"  MLX: {found['mlx_kernel']}"
                cells = [str(counts[name]) for name in ("instructions", "registers", "threads")]
                table.add_row(label, *cells, f"{counts['spills']}:{counts['fills']}")
    Console().print(table)


if __name__ == "__main__":
    main()
