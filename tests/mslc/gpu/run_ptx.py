"""Runs a bundle of PTX on a GPU and compares with NumPy: python run_ptx.py [FOLDER]

Prints a line for each check; exits with 1 where one fails. The bundle is made by make_bundle.py.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import functions
import numpy as np
from cuda_driver import Driver, Module
from dtypes import DECODE, ENCODE, EPSILON, PROJECT_NAME, attention, close, equal, from_bfloat, to_bfloat
from project_checks import ProjectChecks

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent


MLX_NAME = {"float": "float", "half": "half", "bfloat": "bfloat16_t"}


def open_gpu(name: str) -> Module:
    return Module(gpu(), FOLDER / f"{name}.ptx")


@cache
def gpu() -> Driver:
    return Driver()


class Checks(ProjectChecks):
    """`open_module` gives what runs the kernels of a file: on a GPU, or in the simulator."""

    def __init__(self, open_module, samples: int = 1 << 17):
        self.module = cache(open_module)
        self.samples = samples
        self.rng = np.random.default_rng(0)

    # ---- the standard library

    def check_math(self):
        for name, (allowed, reference, ranges) in functions.UNARY.items():
            x = functions.samples(ranges, self.samples, self.rng)
            if name in functions.ODD_OR_EVEN:
                x[::2] *= -1
            yield from self.math_errors(name, allowed, reference, (x,))
        for name, (allowed, reference, *ranges) in functions.BINARY.items():
            arguments = tuple(functions.samples(r, self.samples, self.rng) for r in ranges)
            yield from self.math_errors(name, allowed, reference, arguments)

    def math_errors(self, name, allowed, reference, arguments):
        out = np.zeros_like(arguments[0])
        buffers = dict(enumerate((*arguments, out)))
        self.module("math").run(f"math_{name}", buffers, (len(out) // 256,), (256,))
        with np.errstate(all="ignore"):
            exact = reference(*(a.astype(np.float64) for a in arguments))
        errors = functions.ulp_errors(out, exact)
        worst = int(np.argmax(errors))
        at = ", ".join(f"{a[worst]!r}" for a in arguments)
        text = f"{name:6} max {errors.max():6.3f} ulp (allowed {allowed}), mean {errors.mean():.3f}, worst at ({at})"
        yield text if errors.max() <= allowed else f"FAILED {text}: {out[worst]!r} for {exact[worst]!r}"

    def check_math_special(self):
        cases = {name: [((x,), y) for x, y in pairs] for name, pairs in functions.SPECIAL.items()}
        for name, pairs in (cases | functions.SPECIAL_PAIRS).items():
            arguments = [np.zeros(256, np.float32) for _ in pairs[0][0]]
            for i, (values, _) in enumerate(pairs):
                for argument, value in zip(arguments, values, strict=True):
                    argument[i] = value
            out = np.zeros(256, np.float32)
            self.module("math").run(f"math_{name}", dict(enumerate((*arguments, out))), (1,), (256,))
            for i, (values, expected) in enumerate(pairs):
                if expected is None:
                    expected = np.fmod(*(float(a[i]) for a in arguments))
                with np.errstate(over="ignore"):
                    wanted = np.float32(expected)
                same = np.isnan(out[i]) if np.isnan(wanted) else out[i].tobytes() == wanted.tobytes()
                if not same:
                    yield f"FAILED {name}{values} = {out[i]!r}, not {wanted!r}"
        yield f"{len(cases)} functions"

    def check_groups(self):
        for name in ("groups", "groups_permuted"):
            n = 4 * 96
            x = self.rng.integers(0, 256, n).astype(np.uint32)
            f = self.rng.integers(-8, 8, n).astype(np.float32)
            out = np.zeros((len(functions.GROUP), n), np.uint32)
            self.module(name).run("groups", {0: x, 1: f, 2: out, 3: np.uint32(n)}, (4,), (96,))
            for text, row in zip(functions.GROUP, out, strict=True):
                expected = functions.GROUP[text](x.reshape(-1, 32), f.reshape(-1, 32)).reshape(-1)
                wrong = np.flatnonzero(row != expected)
                if wrong.size:
                    i = wrong[0]
                    yield f"FAILED {name}: {text}: {wrong.size} differ, at {i} {row[i]} for {expected[i]}"
            yield f"{name}: {len(out)} functions"

    def check_ragged_groups(self):
        n = 77
        x = self.rng.integers(0, 256, n).astype(np.uint32)
        out = np.zeros((12, n), np.uint32)
        self.module("groups").run("ragged", {0: x, 1: out}, (1,), (n,))
        for start in range(0, n, 32):
            part = x[start : start + 32]
            rows = out[:, start : start + 32]
            equal(rows[0], np.full_like(part, part.sum()), "simd_sum")
            equal(rows[1], np.full_like(part, part.max()), "simd_max")
            equal(rows[2], np.cumsum(part, dtype=np.uint32), "inclusive sum")
            equal(rows[3], np.cumsum(part, dtype=np.uint32) - part, "exclusive sum")
            equal(rows[4], np.full_like(part, (1 << len(part)) - 1), "active threads")
            quads = [part[i // 4 * 4 : i // 4 * 4 + 4].sum() for i in range(len(part))]
            equal(rows[5], np.array(quads, np.uint32), "quad_sum")
            squares = part * part
            for row, summed in zip(rows[6:], (part, 3 * part, squares, part**0, part, squares), strict=True):
                equal(row, np.full_like(part, summed.sum()), "simd_sum of a vector")
        yield "77 threads"

    def check_positions(self):
        shapes = [((32, 2, 2), (2, 3, 2)), ((16, 4, 2), (3, 1, 2)), ((8, 4, 1), (2, 2, 1)), ((128, 1, 1), (5, 1, 1))]
        shapes_plain = [*shapes, ((5, 3, 2), (2, 2, 2)), ((7, 1, 1), (3, 1, 1))]
        for name, cases in (("positions", shapes_plain), ("positions_permuted", shapes)):
            for size, grid in cases:
                threads, groups = int(np.prod(size)), int(np.prod(grid))
                out = np.zeros((groups, threads, 24), np.uint32)
                self.module(name).run("positions", {0: out}, grid, size)
                for g in range(groups):
                    group = np.array([g % grid[0], g // grid[0] % grid[1], g // grid[0] // grid[1]])
                    i = np.arange(threads)
                    local = np.stack([i % size[0], i // size[0] % size[1], i // size[0] // size[1]], -1)
                    fixed = [*size, *group, *grid, *(np.array(size) * grid)]
                    columns = [group * size + local, local, np.tile(fixed, (threads, 1))]
                    rest = [i, i % 32, i // 32, np.full(threads, -(-threads // 32)), i // 4, i % 4 + 32]
                    equal(out[g], np.concatenate([*columns, np.stack(rest, -1)], -1), f"{name} {size} {grid} group {g}")
            yield f"{name}: {len(cases)} shapes"

    def check_dynamic_memory(self):
        n, groups = 192, 3
        x = self.rng.standard_normal(n * groups).astype(np.float32)
        out = np.zeros_like(x)
        self.module("memory").run("dynamic_memory", {0: x, 1: out}, (groups,), (n,), {0: 4 * n, 1: 8 * n})
        t, g = np.arange(n)[None], np.arange(groups)[:, None]
        expected = x.reshape(groups, n)[:, ::-1] + np.float32((n - 1 - t) * 1000.0) + np.float32(g)
        yield close(out.reshape(groups, n), expected.astype(np.float64) + t % 64 * 5, 1e-6)

    def check_values(self):
        record = np.zeros(
            1, np.dtype([("small", "i4"), ("real", "f4"), ("four", "f2", 4), ("wide", "i8", 3)], align=True)
        )
        record[0] = (-3, 0.5, (1, 2, 7, 4), (100, -200, 1 << 20))
        table = self.rng.standard_normal(96).astype(np.float32)
        out = np.zeros(96, np.float32)
        values = {1: np.int32(11), 2: record, 3: np.float16(0.25), 4: np.uint8(200), 5: table}
        self.module("memory").run("values", {0: out, **values}, (3,), (32,))
        expected = (
            11 - 1.5 + 7 + np.array([100, -200, 1 << 20])[np.arange(96) % 3] + 0.25 + 200 + table.astype(np.float64)
        )
        yield close(out, expected, 2e-7)

    def check_atomics(self):
        n, groups = 128, 20
        total = n * groups
        u = np.array([0, 3 * total, 0, 2**32 - 1, 0xFFFF, 0, 0, 0, 0], np.uint32)
        s, f = np.array([-(10**6), 10**6, 0], np.int32), np.array([0, -5, 5, 0], np.float32)
        tickets = np.zeros(total, np.uint32)
        self.module("memory").run("atomics", {0: u, 1: s, 2: f, 3: tickets}, (groups,), (n,))
        t = np.arange(total, dtype=np.uint32)
        hashed = t * np.uint32(2654435761)
        xor = np.bitwise_xor.reduce(t)
        expected = [total, 0, hashed.max(), hashed.min(), 0xFFFF & ~127, 511, xor, 2 * total, groups * (n + n - 1)]
        equal(u, np.array(expected, np.uint32), "unsigned")
        equal(s, np.array([total - 101, 51 - total, 9], np.int32), "signed")
        equal(f, np.array([total / 2, total - 1, 1 - total, -total], np.float32), "float")
        equal(tickets, np.ones(total, np.uint32), "tickets")
        yield f"{total} threads"

    def check_rounding(self):
        n = 1024
        values = np.exp(self.rng.uniform(-4, 4, 3 * n)) * self.rng.choice([-1, 1], 3 * n)
        h, b = values.astype(np.float16), to_bfloat(values)
        half, bfloat = np.zeros_like(h), np.zeros_like(b)
        self.module("memory").run("rounding", {0: h, 1: b, 2: half, 3: bfloat}, (n // 128,), (128,))
        x, y, z = h.reshape(n, 3).T
        equal(half.reshape(n, 3)[:, 0], x + y + z, "half sum rounded twice")
        equal(half.reshape(n, 3)[:, 2], (x.astype(np.float32) * np.float32(1.37)).astype(np.float16), "to half")
        p, q, s = from_bfloat(b.reshape(n, 3).T)
        equal(bfloat.reshape(n, 3)[:, 0], to_bfloat(from_bfloat(to_bfloat(p + q)) + s), "bfloat sum rounded twice")
        equal(bfloat.reshape(n, 3)[:, 1], to_bfloat(p / q), "bfloat quotient")
        equal(bfloat.reshape(n, 3)[:, 2], to_bfloat(p * np.float32(1.37)), "to bfloat")
        quotient = half.reshape(n, 3)[:, 1]
        exact = x.astype(np.float64) / y
        error = np.abs(quotient - exact) / np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
        if not error.max() <= 0.501:  # rounded once more through float: half a unit and nothing
            raise AssertionError(f"half quotient off by {error.max()} ulp")
        yield f"{n} values"

    # ---- matrices

    def check_matrix(self):
        module = self.module("matrix")
        for name in module.kernels:
            if not name.startswith("multiply"):
                continue
            *types, m, n, k = name.split("_")[1:]
            m, n, k = 8 * int(m), 8 * int(n), 8 * int(k)
            a, b, c = (
                ENCODE[t](self.rng.standard_normal(s)) for t, s in zip(types, ((m, k), (k, n), (m, n)), strict=False)
            )
            d = ENCODE[types[3]](np.zeros((m, n)))
            module.run(name, {0: a, 1: b, 2: c, 3: d}, (1,), (32,))
            exact = DECODE[types[0]](a) @ DECODE[types[1]](b) + DECODE[types[2]](c)
            # One rounding of the result for every 8 of the inner dimension.
            yield f"{name}: " + close(DECODE[types[3]](d), exact, EPSILON[types[3]] * (2 + k // 8))
        out = np.arange(128, dtype=np.float32)
        transposed = np.zeros(64, np.float32)
        module.run("diagonal", {0: out, 1: transposed}, (1,), (32,))
        equal(out[:64].reshape(8, 8), 3 * np.eye(8, dtype=np.float32), "diagonal")
        equal(transposed.reshape(8, 8), np.arange(64, 128, dtype=np.float32).reshape(8, 8).T, "transposed load")

    def check_gemm(self):
        """MLX's steel GEMM, A B^T."""
        m, n, k = 128, 192, 96
        params = np.zeros(
            1,
            np.dtype(
                {
                    "names": ["M", "N", "K", "lda", "ldb", "ldd", "tn", "tm", "sa", "sb", "sd", "swizzle", "gk", "nd"],
                    "formats": ["i4"] * 8 + ["i8"] * 3 + ["i4"] * 3,
                },
                align=True,
            ),
        )
        params[0] = (m, n, k, k, k, n, n // 64, m // 64, 0, 0, 0, 0, k // 16, 0)
        for dtype in ENCODE:
            a, b = (ENCODE[dtype](self.rng.standard_normal((rows, k))) for rows in (m, n))
            d = ENCODE[dtype](np.zeros((m, n)))
            buffers = {0: a, 1: b, 3: d, 4: params, 6: np.zeros(1, np.int32), 7: np.zeros(2, np.int64)}
            self.module("gemm").run(f"gemm_{MLX_NAME[dtype]}", buffers, (n // 64, m // 64, 1), (32, 2, 2))
            exact = DECODE[dtype](a) @ DECODE[dtype](b).T
            yield f"{dtype}: " + close(DECODE[dtype](d), exact, 2 * EPSILON[dtype] + 2e-6)

    # ---- attention

    def operands(self, dtype, heads, kv_heads, queries, keys, dim):
        shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim))
        return [ENCODE[dtype](self.rng.standard_normal(shape)) for shape in shapes]

    def check_sdpa_vector(self):
        heads, kv_heads, keys = 4, 2, 77
        for dtype in ENCODE:
            for dim in (64, 128):
                q, k, v = self.operands(dtype, heads, kv_heads, 1, keys, dim)
                out = np.zeros_like(q)
                scale = dim**-0.5
                values = [np.int32(heads // kv_heads), np.int32(keys)]
                values += [np.uint64(n) for n in (keys * dim, dim, keys * dim, dim)] + [np.float32(scale)]
                buffers = {0: q, 1: k, 2: v, 3: out} | {4 + i: value for i, value in enumerate(values)}
                buffers |= {i: np.int32(0) for i in (13, 14, 15, 17)}
                name = f"sdpa_{MLX_NAME[dtype]}_{dim}"
                self.module("sdpa_vector").run(name, buffers, (heads, 1, 1), (1024, 1, 1))
                exact = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, False)
                yield f"{name}: " + close(DECODE[dtype](out), exact, 2 * EPSILON[dtype] + 3e-6)

    def check_steel_attention(self):
        names = ["B", "H", "D", "qL", "kL", "gqa", "scale", "NQ", "NK", "NQa", "NKa", "qrem", "krem", "qoff", "strides"]
        formats = ["i4"] * 6 + ["f4"] + ["i4"] * 7 + ["(4,3)i8"]
        params = np.zeros(1, np.dtype({"names": names, "formats": formats}, align=True))
        heads, kv_heads = 2, 1
        for module, queries, keys, causal in (("attention_even", 64, 128, False), ("attention_ragged", 45, 71, True)):
            for dtype in ENCODE:
                for dim, block in ((64, 32), (128, 16)):
                    q, k, v = self.operands(dtype, heads, kv_heads, queries, keys, dim)
                    out = np.zeros_like(q)
                    scale = dim**-0.5
                    lengths = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
                    strides = [[h * n * dim, n * dim, dim] for h, n in lengths]
                    tiles = -(-queries // 32), -(-keys // block), queries // 32, keys // block
                    rest = queries % 32, keys % block, keys - queries
                    params[0] = (1, heads, dim, queries, keys, heads // kv_heads, scale, *tiles, *rest, strides)
                    name = f"attention_{MLX_NAME[dtype]}_{dim}"
                    self.module(module).run(
                        name, {0: q, 1: k, 2: v, 3: out, 4: params}, (tiles[0], heads, 1), (32, 4, 1)
                    )
                    exact = attention(*(DECODE[dtype](x) for x in (q, k, v)), scale, causal)
                    allowed = 2 * EPSILON[dtype] + 3e-6
                    yield f"{module} {name}: " + close(DECODE[dtype](out), exact, allowed)

    # ---- silu_gate

    def check_silu_gate(self):
        layout = np.dtype(
            [("size", "i8"), ("shape", "i8", 8), ("strides", "i8", (4, 8)), ("rank", "i4"), ("pad", "i4")]
        )
        for dtype in ENCODE:
            for aligned in (True, False):
                for flat in (True, False):
                    for direction in ("forward", "backward"):
                        yield self.silu_case(layout, dtype, aligned, flat, direction)

    def silu_case(self, layout, dtype, aligned, flat, direction):
        pack = 4 if dtype == "float" else 8
        shape = (5, 7, 64) if aligned else (5, 7, 61)
        inputs = 2 if direction == "forward" else 3
        stored = shape if flat else (7, 5, shape[2])  # strided operands are transposed views
        encoded = [ENCODE[dtype](3 * self.rng.standard_normal(stored)) for _ in range(inputs)]
        views = [x if flat else x.transpose(1, 0, 2) for x in encoded]
        size, item = int(np.prod(shape)), encoded[0].itemsize
        params = np.zeros(1, layout)
        params["size"], params["rank"] = size, 3
        params["shape"][0, :3] = shape
        for i, view in enumerate(views):
            params["strides"][0, i, :3] = [s // item for s in view.strides]
        outputs = [ENCODE[dtype](np.zeros(shape)) for _ in range(1 if direction == "forward" else 2)]
        threads = 256
        work = -(-size // (threads * 2 * pack)) if flat else -(-(shape[0] * shape[1] * -(-shape[2] // pack)) // threads)
        kernel = f"silu_gate_{direction}_{PROJECT_NAME[dtype]}_{'flat' if flat else 'strided'}"
        buffers = dict(enumerate([*encoded, *outputs, params]))
        self.module("silu_aligned" if aligned else "silu_unaligned").run(kernel, buffers, (work,), (threads,))
        gate, up, *rest = (DECODE[dtype](view) for view in views)
        sigmoid = 1 / (1 + np.exp(-gate))
        if rest:
            exact = [rest[0] * up * sigmoid * (1 + gate * (1 - sigmoid)), rest[0] * gate * sigmoid]
        else:
            exact = [gate * sigmoid * up]
        allowed = EPSILON[dtype] + 6e-7
        lines = [close(DECODE[dtype](out), wanted, allowed) for out, wanted in zip(outputs, exact, strict=True)]
        return f"{kernel}, {'aligned' if aligned else 'unaligned'}: {'; '.join(lines)}"


def run_check(checks: Checks, name: str) -> bool:
    """Prints a line for each case. An exception is a failure too."""
    passed = True
    try:
        for line in getattr(checks, name)():
            failed = "FAILED" in line
            passed &= not failed
            print(f"{'FAIL' if failed else 'ok  '} {name[6:]}: {line}", flush=True)
    except Exception as error:
        detail = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        print(f"FAIL {name[6:]}: {detail}", flush=True)
        return False
    return passed


def main() -> int:
    if len(sys.argv) > 2:
        return 0 if run_check(Checks(open_gpu), sys.argv[2]) else 1
    print(f"GPU: {Driver().name}", flush=True)
    failed = []
    for name in CHECKS:  # each in a process of its own: an error of the GPU spoils the context
        if subprocess.run([sys.executable, __file__, str(FOLDER), name], check=False).returncode:
            failed.append(name[6:])
    print(
        f"{len(CHECKS)} checks, {len(failed)} failed: {' '.join(failed)}" if failed else f"{len(CHECKS)} checks passed"
    )
    return 1 if failed else 0


CHECKS = sorted(name for name in dir(Checks) if name.startswith("check_"))

if __name__ == "__main__":
    sys.exit(main())
