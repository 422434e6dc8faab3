"""Launch descriptions, and the commands that take them."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_anvil.mslc.commands import profile, run
from mlx_anvil.mslc.launches import LaunchError, load_launches, parse_buffer

SILU = """#include <metal_stdlib>
using namespace metal;
constant bool twice [[function_constant(0)]];
struct Params { uint size; float factor; };
kernel void naive(const device float* gate [[buffer(0)]], device float* out [[buffer(1)]],
                  constant Params& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  const float x = gate[i];
  if (i < params.size) out[i] = (twice ? 2 : 1) * params.factor * x / (1 + exp(-x));
}
kernel void scattered(const device float* gate [[buffer(0)]], device float* out [[buffer(1)]],
                      constant Params& params [[buffer(2)]], uint i [[thread_position_in_grid]],
                      uint size [[threads_per_grid]]) {
  i = i % 8 * (size / 8) + i / 8;
  const float x = gate[i];
  if (i < params.size) out[i] = (twice ? 2 : 1) * params.factor * x / (1 + exp(-x));
}
"""
ARGUMENTS = ["--grid", "256", "--threadgroup", "64", "--dispatch", "threads", "-C", "twice=true"]
BUFFERS = ["0=random:float32:256", "1=zeros:float32:256", "2=struct:uint32=256,float32=0.5"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "silu.metal"
    path.write_text(SILU)
    return path


def describe(source, **changes):
    table = {
        "source": source.name,
        "kernel": "naive",
        "grid": [4, 1, 1],
        "threadgroup": [64, 1, 1],
        "constants": {"twice": True},
        "buffers": dict(text.split("=", 1) for text in BUFFERS),
    }
    return {**table, **changes}


def write(path, tables):
    path.write_text(json.dumps(tables))
    return path


def invoke(command, *arguments):
    result = CliRunner().invoke(command.command, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, result.output


# ---- buffers


@pytest.mark.parametrize(
    ("text", "dtype", "values"),
    [
        ("3", np.int32, 3),
        ("-2", np.int32, -2),
        ("0.5", np.float32, 0.5),
        ("uint64:7", np.uint64, 7),
        ("bool:true", np.bool_, True),
        ("bfloat16:1.5", np.uint16, 0x3FC0),
        ("zeros:float16:2,2", np.float16, [[0, 0], [0, 0]]),
        ("ones:bfloat16:2", np.uint16, [0x3F80] * 2),
        ("arange:int32:2,3", np.int32, [[0, 1, 2], [3, 4, 5]]),
        ("struct:uint16=1*2,uint32=0x10", np.uint8, [1, 0, 1, 0, 16, 0, 0, 0]),
    ],
)
def test_buffers(text, dtype, values):
    array, output = parse_buffer(text)
    assert array.dtype == dtype
    assert output == ""
    np.testing.assert_array_equal(array, np.array(values, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8", "uint32", "int32", "int64", "bool"])
def test_random_buffers_are_the_same_in_every_run(dtype):
    first, _ = parse_buffer(f"random:{dtype}:100", 3)
    np.testing.assert_array_equal(first, parse_buffer(f"random:{dtype}:100", 3)[0])
    assert len(np.unique(first)) > 1
    assert (first != parse_buffer(f"random:{dtype}:100", 4)[0]).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zeros:float32", "is not zeros:DTYPE:SHAPE"),
        ("zeros:float33:4", "'float33' is not a data type"),
        ("zeros:float32:4x5", "not a list of whole numbers"),
        ("missing.npy", "there is no file missing.npy"),
        ("hello", "'hello' is not a number"),
        ("struct:uint32", "is not a field such as"),
        ("a:b:c", "does not describe a buffer"),
    ],
)
def test_bad_buffers(text, message):
    with pytest.raises(LaunchError, match=message):
        parse_buffer(text)


# ---- description files


def test_one_launch_or_several(source, tmp_path):
    one = write(tmp_path / "one.json", describe(source))
    two = write(tmp_path / "two.json", {"launch": [describe(source), describe(source, kernel="scattered")]})
    assert [d.kernel for d in load_launches(one)] == ["naive"]
    assert [d.kernel for d in load_launches(two)] == ["naive", "scattered"]
    assert load_launches(one)[0].source == source


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"kernel": "k"}, "'source' is missing"),
        ({"sourec": "k"}, "unknown key 'sourec'"),
        ([3], "a launch must be a table"),
        ({"source": "a", "kernel": "k", "grid": "4", "threadgroup": [4]}, "grid must be a list of one to three"),
    ],
)
def test_bad_descriptions(tables, message, tmp_path):
    with pytest.raises(LaunchError, match=message):
        load_launches(write(tmp_path / "bad.json", tables))


def test_text_that_is_not_json(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(LaunchError, match=r"bad\.json: "):
        load_launches(path)


def test_toml(source, tmp_path):
    path = tmp_path / "launch.toml"
    path.write_text(
        'source = "silu.metal"\nkernel = "naive"\ngrid = [4]\nthreadgroup = [64]\n'
        '[constants]\ntwice = true\n[buffers]\n0 = "ones:float32:4"\nout = 3\n'
    )
    if sys.version_info < (3, 11):
        with pytest.raises(LaunchError, match=r"needs Python 3\.11"):
            load_launches(path)
        return
    (description,) = load_launches(path)
    assert description.constants == {"twice": True}
    assert description.buffers == {0: "ones:float32:4", "out": "3"}


# ---- commands


def test_run_writes_outputs(source, tmp_path):
    out = tmp_path / "out.npy"
    buffers = [BUFFERS[0], f"1=zeros:float32:256:{out}", BUFFERS[2]]
    code, output = invoke(run, source, "naive", *buffers, *ARGUMENTS)
    assert (code, "4 threadgroups" in output) == (0, True), output
    x, _ = parse_buffer("random:float32:256", 0)
    np.testing.assert_allclose(np.load(out), x / (1 + np.exp(-x)), rtol=1e-5)


def test_run_takes_a_description(source, tmp_path):
    out = tmp_path / "out.npy"
    buffers = {"gate": "ones:float32:256", "out": f"zeros:float32:256:{out}", "2": "struct:uint32=9,float32=1"}
    code, output = invoke(run, write(tmp_path / "launch.json", describe(source, buffers=buffers)))
    assert code == 0, output
    assert np.count_nonzero(np.load(out)) == 9


def test_profile_prints_a_table(source):
    code, output = invoke(profile, source, "scattered", *BUFFERS, *ARGUMENTS)
    assert code == 0, output
    lines = output.splitlines()
    assert next(line.split()[-1] for line in lines if line.startswith("device bytes read, requested")) == "1,024"
    # The read of `gate`: 8 lines for each of 8 SIMD groups, where 1 would do, at full width.
    assert next(line.split() for line in lines if line.startswith("silu.metal:14:")) == [
        *("silu.metal:14:19", "device", "gate", "read", "8", "1,024", "8.00", "1.00", "100%")
    ]


def test_profile_against_another_kernel(source):
    code, output = invoke(profile, source, "naive", *BUFFERS, *ARGUMENTS, "--against", "scattered", "--json")
    assert code == 0, output
    data = json.loads(output)
    ours, theirs = data["profiles"]["total"], data["against"]["total"]
    assert ours["device_bytes_read"] == theirs["device_bytes_read"] == 1024
    assert (ours["lines_per_access"], theirs["lines_per_access"]) == (1, 8)
    assert ours["transcendentals"] == theirs["transcendentals"] == 256
    assert data["profiles"]["launches"][0]["kernel"] == "naive"
    assert data["against"]["kernels"][0]["kernel"] == "scattered"


def test_profile_compares_descriptions_side_by_side(source, tmp_path):
    ours = write(tmp_path / "ours.json", describe(source, label="ours"))
    theirs = write(tmp_path / "theirs.json", {"launch": [describe(source, kernel="scattered", label="theirs")] * 2})
    code, output = invoke(profile, ours, "--against", theirs)
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0].split() == ["ours", "theirs", "ratio"]
    cells = next(line.split()[-3:] for line in lines if line.startswith("128-byte lines touched"))
    assert cells == ["16", "256", "0.06x"]
    assert next(line.split()[-1] for line in lines if line.startswith("device bytes read, req")) == "0.50x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["naive"], "needs KERNEL, --grid and --threadgroup"),
        (["nosuch", *BUFFERS, *ARGUMENTS], "no kernel named 'nosuch'"),
        (["naive", "0", *ARGUMENTS], "'0' is not INDEX=VALUE"),
        (["naive", *BUFFERS, *ARGUMENTS, "--against", "other.metal:naive"], "other.metal"),
    ],
)
def test_errors_are_messages(source, arguments, message):
    code, output = invoke(profile, source, *arguments)
    assert code != 0
    assert message in output
