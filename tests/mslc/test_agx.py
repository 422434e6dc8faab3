"""Machine code for Apple GPUs by Mesa's compiler: the counts. The code cannot be run here."""

import json
import re
import sys

import pytest
from click.testing import CliRunner

from mlx_anvil.mslc import Source, ToolchainError
from mlx_anvil.mslc.agx import compile_agx, find_agx_stats
from mlx_anvil.mslc.agx_code import CLASSES, OTHER, class_of, instruction_classes, machine_code, opcodes
from mlx_anvil.mslc.commands.agx import command
from tests.mslc.msl import HEAD
from tests.mslc.ptx_support import METAL, needs_metal


def is_built():
    try:
        return bool(find_agx_stats())
    except ToolchainError:
        return False


needs_agx = pytest.mark.skipif(not is_built(), reason="needs Mesa's AGX compiler (tools/agx/build.sh)")

KERNELS = """
constant bool doubled [[function_constant(3)]];
[[kernel, max_total_threads_per_threadgroup(64)]]
void scale(const device float* x [[buffer(0)]], device float* out [[buffer(1)]], constant float& factor [[buffer(2)]],
           uint i [[thread_position_in_grid]]) {
  const float value = x[i] * factor;
  out[i] = doubled ? value + value * value * value : value;
}
kernel void sum(const device half* x [[buffer(0)]], device half* out [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  threadgroup float values[300];
  values[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = half(simd_sum(values[299 - i]));
}
"""


def write(tmp_path, text=KERNELS):
    path = tmp_path / "kernels.metal"
    path.write_text(HEAD + text)
    return path


def agx(text, name, constants=None):
    return compile_agx(Source.load(HEAD + text), [name], constants)[0]


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


# ---- what needs no compiler


PREAMBLE = """block0 {
   uniform_store r0l, 4, x
   r0 = get_sr #80
   uniform_store r0l, 8, x
   stop
}

"""
EARLIER = """block0 {
   %1 = get_sr #80
   %2 = collect %1
   device_store %2, u0, 0, x, #0, slot 0
   stop
}

"""
LISTING = f"""shader: MESA_SHADER_COMPUTE
{3 * PREAMBLE}{2 * EARLIER}block0 {{
   r0 = get_sr #80
   r1 = convert r0, #1
   device_store r1, u0, 0, x, #0, slot 0
   stop
}}

"""


def test_listing_of_the_main_program():
    code = machine_code(LISTING)
    assert code.startswith("block0 {\n   r0 = get_sr")
    assert code.endswith("stop\n}\n")
    counts = instruction_classes(code)
    assert {name: count for name, count in counts.items() if count} == {
        "move": 1,
        "convert": 1,
        "device memory": 1,
        "branch": 1,
    }
    assert machine_code(2 * EARLIER) == ""


def test_copies_and_swaps_are_moves():
    swap = "   r1 = xor r1, r24\n   r24 = xor r1, r24\n   r1 = xor r1, r24\n"
    others = "   r1 = bitop r2, #0, #5\n   r1 = bitop r2, r3, #a\n   r1 = xor r1, r24\n   r1 = xor r1, r24\n"
    assert opcodes(f"   r1 = bitop u64, #0, #a\n{swap}{others}") == {"mov": 1, "swap": 3, "bitop": 2, "xor": 2}


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("ffma", "float"),
        ("hfma", "float"),
        ("fcmpsel", "float"),
        ("exp2", "special"),
        ("iadd", "integer"),
        ("xor", "integer"),
        ("mov_imm", "move"),
        ("local_atomic", "threadgroup"),
        ("device_load", "device memory"),
        ("simd_reduce", "SIMD group"),
        ("shuffle_xor", "SIMD group"),
        ("icmp_ballot", "SIMD group"),
        ("stack_load", "spill"),
        ("break_if_icmp", "branch"),
        ("jmp_exec_none", "branch"),
        ("threadgroup_barrier", "wait"),
        ("iter", OTHER),
    ],
)
def test_class_of_an_instruction(opcode, name):
    assert class_of(opcode) == name
    assert name in (*CLASSES, OTHER)


# ---- errors


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Stands in for agx_stats: prints what a test says."""

    def install(text, status=0, error=""):
        path = tmp_path / "agx_stats"
        body = f"import sys\nprint({text!r})\nprint({error!r}, file=sys.stderr)\nsys.exit({status})\n"
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(0o755)
        monkeypatch.setenv("MLX_ANVIL_AGX", str(path))

    return install


def test_program_that_is_not_built(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_ANVIL_AGX", raising=False)
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"^the AGX compiler is not built: tools/agx/build\.sh .* builds it once"):
        find_agx_stats()
    monkeypatch.setenv("MLX_ANVIL_AGX", str(tmp_path / "none"))
    with pytest.raises(ToolchainError, match=r"^MLX_ANVIL_AGX is '.*none', which is not a program: tools/agx/build"):
        find_agx_stats()


STATISTICS = {
    "interface": 1,
    "half_registers": 20,
    "threads": 1024,
    "threadgroup_bytes": 1200,
    "uniform_halves": 128,
    "code_bytes": 40,
    "message": "MESA_SHADER_COMPUTE shader: 4 inst, 3 alu, 3 fscib, 0 ic, 40 bytes, 19 regs, 128 uniforms, 16 scratch, "
    "1024 threads, 2 loops, 5:6 spills:fills",
}


def test_statistics_that_the_program_prints(tmp_path, program):
    program(LISTING + json.dumps(STATISTICS))
    (kernel,) = compile_agx(write(tmp_path), ["scale"], {"doubled": False})
    assert (kernel.name, kernel.max_threads, kernel.instructions, kernel.registers) == ("scale", 64, 4, 20)
    assert (kernel.spills, kernel.fills, kernel.scratch_bytes, kernel.threadgroup_bytes) == (5, 6, 16, 1200)
    assert sum(kernel.classes.values()) == kernel.instructions
    result = run(write(tmp_path), "--kernel", "scale", "--constants", "doubled=false", "--json", "--disassemble")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == [kernel.to_json() | {"code": kernel.code}]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (
            json.dumps(STATISTICS | {"interface": 0}),
            "agx_stats belongs to another version of mlx-anvil: run tools/agx/",
        ),
        (json.dumps(STATISTICS | {"message": "?"}), r"Mesa reports its statistics in an unknown form: \?"),
        ("nothing", "agx_stats printed 'nothing' instead of statistics"),
    ],
)
def test_program_of_another_version(tmp_path, program, printed, message):
    program(printed)
    with pytest.raises(ToolchainError, match=message):
        compile_agx(write(tmp_path), ["sum"])


def test_program_that_fails(tmp_path, program):
    program("", status=1, error="first\nassertion `x' failed.")
    with pytest.raises(ToolchainError, match=r"^Mesa cannot compile kernel 'sum': assertion `x' failed\.$"):
        compile_agx(write(tmp_path), ["sum"])


def test_errors_of_the_command(tmp_path, program):
    program(json.dumps(STATISTICS))
    path = write(tmp_path)
    unknown = run(path, "--kernel", "scales")
    assert unknown.exit_code == 1
    assert unknown.output == "there is no kernel 'scales': the file has scale, sum\n"
    missing = run(path, "--kernel", "scale")
    assert missing.exit_code == 1
    assert missing.output == "kernel 'scale' needs a value for function constant doubled\n"
    bad = run(path, "--kernel", "scale", "--constants", "doubled")
    assert bad.exit_code == 2
    assert "'doubled' is not NAME=VALUE" in bad.output
    broken = run(write(tmp_path, "kernel void k() { nothing(); }"), "--kernel", "k")
    assert broken.exit_code == 1
    assert re.search(r"kernels\.metal:3:\d+: error: .*nothing", broken.output)


# ---- with Mesa's compiler


@needs_agx
def test_function_constants_choose_the_code():
    short, long = (agx(KERNELS, "scale", {"doubled": value}) for value in (False, True))
    assert short.max_threads == 64
    assert short.classes["device memory"] == long.classes["device memory"]
    assert re.findall(r"= (f\w+)", short.code) == ["fmul"]
    assert short.classes["float"] == 1 < long.classes["float"]
    assert short.spills == short.fills == short.threadgroup_bytes == 0
    assert short.threads == 1024
    assert 0 < short.registers < 60
    assert sum(long.classes.values()) == long.instructions
    assert short.classes[OTHER] == long.classes[OTHER] == 0


@needs_agx
def test_threadgroup_memory_and_reductions():
    kernel = agx(KERNELS, "sum")
    assert kernel.threadgroup_bytes == 1200
    assert kernel.max_threads is None
    assert re.findall(r"= (simd_\w+)", kernel.code) == ["simd_reduce"]
    assert kernel.classes["threadgroup"] == 2
    assert "threadgroup_barrier" in kernel.code


SHUFFLES = """
kernel void k(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
              const device ushort* at [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = EXPRESSION;
}
"""


@needs_agx
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_shuffle_xor(x[i], 4)", ["shuffle_xor"]),
        ("simd_shuffle_down(x[i], 3)", ["shuffle_down"]),
        ("simd_shuffle_up(x[i], 1)", ["shuffle_up"]),
        ("simd_broadcast(x[i], 5)", ["shuffle"]),
        ("simd_shuffle(x[i], at[i])", ["shuffle"] * 4),
        ("simd_shuffle_xor(x[i], at[0])", ["shuffle"] * 4),
        ("simd_max(x[i])", ["simd_reduce"]),
        ("quad_sum(x[i])", ["quad_reduce"]),
        ("simd_prefix_exclusive_sum(x[i])", ["simd_prefix"]),
    ],
)
def test_simd_group_operations(expression, expected):
    kernel = agx(SHUFFLES.replace("EXPRESSION", expression), "k")
    assert re.findall(r"= ((?:simd_|quad_)?(?:shuffle|reduce|prefix)\w*)", kernel.code) == expected
    assert kernel.classes["SIMD group"] == len(expected)


MATRICES = """
#include <metal_simdgroup_matrix>
template <typename T>
[[kernel]] void products(const device T* a [[buffer(0)]], const device T* b [[buffer(1)]],
                         device float* out [[buffer(2)]]) {
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8>(0.0f);
  for (int i = 0; i < 3; ++i) {
    simdgroup_matrix<T, 8, 8> x, y;
    simdgroup_load(x, a + 64 * i);
    simdgroup_load(y, b + 64 * i);
    simdgroup_multiply_accumulate(sum, x, y, sum);
  }
  simdgroup_store(sum, out);
}
template [[host_name("float")]] [[kernel]] decltype(products<float>) products<float>;
template [[host_name("half")]] [[kernel]] decltype(products<half>) products<half>;
template [[host_name("bfloat")]] [[kernel]] decltype(products<bfloat>) products<bfloat>;
"""


@needs_agx
def test_matrix_products():
    kernels = {name: agx(MATRICES, name) for name in ("float", "half", "bfloat")}
    for kernel in kernels.values():
        assert kernel.classes["matrix"] == 3
    # Two elements a lane: pairs of 16 bits, and of 32 bits where they are summed.
    products = re.findall(r"(\w+)\.\.\.\w+ = matrix_fma (\w+)\.\.\.\w+, (\w+)\.\.\.", kernels["half"].code)
    assert [[name[-1] in "lh" for name in registers] for registers in products] == [[False, True, True]] * 3
    assert kernels["bfloat"].instructions > kernels["half"].instructions  # it is converted to float


@needs_agx
def test_copy_of_a_constant_struct():
    """The copy uses a generic pointer, which SPIR-V does not have for `constant` memory."""
    text = """
struct Params { int rows, columns; };
int area(Params params) { return params.rows * params.columns; }
kernel void k(device int* out [[buffer(0)]], constant Params& params [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Params copy = params;
  out[i] = area(copy);
}
"""
    kernel = agx(text, "k")
    assert kernel.classes["device memory"] == 1  # the product is computed once for all threads
    assert kernel.spills == 0


@needs_agx
def test_declared_limit_bounds_the_registers():
    """A kernel of 1024 threads has 104 half registers per thread, and spills the rest."""
    text = """
[[kernel LIMIT]] void k(const device float4* x [[buffer(0)]], device float4* out [[buffer(1)]],
                        constant int& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float4 sums[20];
  for (int j = 0; j < 20; ++j) sums[j] = x[i + j];
  for (int k = 0; k < n; ++k)
    for (int j = 0; j < 20; ++j) sums[j] = sums[j] * sums[(j + 7) % 20] + x[k];
  for (int j = 0; j < 20; ++j) out[i + j] = sums[j];
}
"""
    free = agx(text.replace("LIMIT", ""), "k")
    bound = agx(text.replace("LIMIT", ", max_total_threads_per_threadgroup(1024)"), "k")
    assert (free.spills, free.fills) == (0, 0)
    assert free.registers > 150
    assert bound.registers <= 104
    assert (free.threads < 1024, bound.threads) == (True, 1024)
    assert bound.spills > 0
    assert bound.classes["spill"] >= bound.spills + bound.fills
    assert bound.scratch_bytes > 0


@needs_agx
@needs_metal
def test_a_kernel_of_the_project_in_the_table():
    path = METAL / "metal" / "silu_gate" / "silu_gate.metal"
    name = "silu_gate_forward_float16_flat"
    result = run(path, "-I", METAL, "--kernel", name, "--constants", "0=1,1=0", "--disassemble")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:2] == [f"1  {name}", "block0 {"]
    headings = next(i for i, line in enumerate(lines) if line.split()[:2] == ["instructions", "registers"])
    assert lines[headings].split()[2:] == ["threads", "spills:fills", "threadgroup", "bytes"]
    assert lines[headings + 1].split()[0] == "1"
    assert all(len(line) <= 80 for line in lines[headings:])
