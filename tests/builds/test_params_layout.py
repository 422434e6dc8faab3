"""Params structs have the same layout in C++ and in Metal, and no padding that the header does not show.

clang prints the layout of every struct, once for the header as the macOS build compiles it and once for the Metal
source.
"""

import re
from pathlib import Path

import pytest

from mlx_anvil import _ext
from mlx_anvil.mslc.compiler import LANGUAGE_FLAGS, RELAXED_SPACES, run_preprocessor, run_rewriter
from mlx_anvil.mslc.preprocess import Source
from mlx_anvil.mslc.toolchain import SHIM, find_zig, run_tool

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parents[2]
HEADERS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "metal").rglob("*params.h"))}
CLANG_HEADERS = Path(find_zig()).parent / "lib" / "include"
DUMP = ["-Xclang", "-fdump-record-layouts-complete", "-fsyntax-only"]
_RECORD = re.compile(
    r"^\*\*\* Dumping AST Record Layout\n +0 \| struct (?:\w+::)*(\w+)\n(.*?)^ +\| \[sizeof=(\d+)", re.M | re.S
)
_FIELD = re.compile(r"^ +(\d+) \| +.*?(\w+)(?:\[\d+\])*$", re.M)
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.M | re.S)
# What both languages lay out alike: no vectors, no bool, no long.
_PLAIN = re.compile(r"(u?int32_t|u?int64_t|float|\w+Params) ")

Layout = tuple[int, list[tuple[str, str]]]  # bytes, (offset, name) of each field


def parse(dump: str) -> dict[str, Layout]:
    return {name: (int(size), _FIELD.findall(body)) for name, body, size in _RECORD.findall(dump)}


def compile_as_host(header: str) -> str:
    """Compiles for arm64 macOS. Of the standard library only clang's own stdint.h is available."""
    text = re.sub(r'#include "(metal/.*?)"', lambda found: HEADERS[found[1]], header)
    text = text.replace("<cstdint>", "<stdint.h>")
    target = ["-target", "arm64-apple-macosx14.0.0", "-ffreestanding", "-isystem", str(CLANG_HEADERS)]
    command = ["clang", *target, "-x", "c++", "-std=c++20", "-Wno-everything", "-Werror=padded", *DUMP, "-"]
    result = run_tool(command, text=text)
    assert result.returncode == 0, result.stderr
    return result.stdout


def compile_as_metal(op: str) -> str:
    source = Source(text=_ext._op_source(op), name=f"metal/{op}")
    rewritten = run_rewriter(source, run_preprocessor(source))
    command = ["clang", *LANGUAGE_FLAGS, "-w", "-include", str(SHIM / "mslc.h"), *RELAXED_SPACES, *DUMP, "-"]
    result = run_tool(command, text=rewritten.text)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("op", sorted(p.name for p in (ROOT / "metal").iterdir() if p.name != "common"))
def test_same_layout(op):
    metal = parse(compile_as_metal(op))
    source = _ext._op_source(op)
    headers = [text for name, text in HEADERS.items() if f'"{name}"' in source]
    assert headers
    for header in headers:
        host = parse(compile_as_host(header))
        names = [name for name, _ in _STRUCT.findall(header)]
        assert {name: metal[name] for name in names} == {name: host[name] for name in names}


@pytest.mark.parametrize("header", HEADERS)
def test_header_states_its_layout(header):
    structs = _STRUCT.findall(HEADERS[header])
    assert structs
    for name, body in structs:
        assert f"static_assert(sizeof({name}) ==" in HEADERS[header], f"{name} has no static_assert of its size"
        fields = [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]
        assert [field for field in fields if not _PLAIN.match(field)] == []


def test_hidden_padding_is_found():
    with pytest.raises(AssertionError, match="padding size of 'Params' with 4 bytes"):
        compile_as_host("struct Params { long size; int rank; };")


def test_another_order_is_found():
    one, other = (
        parse(compile_as_host(f"struct Params {{ {fields} }};")) for fields in ("int a; int b;", "int b; int a;")
    )
    assert one["Params"] == (8, [("0", "a"), ("4", "b")])
    assert one != other
