"""Function constants of PTX that get their values when it is loaded, and the package's files of such kernels."""

import re
import struct
from dataclasses import replace

import pytest

from mlx_anvil.mslc import CompileError, Source
from mlx_anvil.mslc.ptx import compile_ptx, cubin, with_constants
from tests.mslc.msl import HEAD
from tests.mslc.ptx_support import needs_ptxas, ptx

DEFERRED_SOURCE = """
constant bool doubles [[function_constant(2)]];
constant bool adds [[function_constant(13)]];
kernel void k(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float x[4];
  for (int j = 0; j < 4; ++j) x[j] = in[4 * i + j];
  for (int j = 0; j < 4; ++j) {
    if (doubles) x[j] = x[j] * 2.5f;
    if (adds && !doubles) x[j] = x[j] + metal::exp(x[j]);
  }
  for (int j = 0; j < 4; ++j) out[4 * i + j] = x[j];
}"""


def deferred_ptx(text):
    return compile_ptx(Source.load(HEAD + text), defers_constants=True)


def test_deferred_constants_are_words_that_the_loader_replaces():
    text = deferred_ptx(DEFERRED_SOURCE).text
    assert set(re.findall(r"mslc_function_constant_(\d+)", text)) == {"2", "13"}
    assert not re.search(r"\.extern|ld\.const", text)


@needs_ptxas
@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_deferred_constants_assemble_as_known_ones(doubles, adds):
    values = {2: doubles, 13: adds}
    deferred = loaded(deferred_ptx(DEFERRED_SOURCE), values)
    known = ptx(DEFERRED_SOURCE, constants=values)
    assert 0.9 < code_size(deferred) / code_size(known) < 1.1
    if not doubles and not adds:  # so much would a branch show that was not dropped
        everything = ptx(DEFERRED_SOURCE, constants={2: False, 13: True})
        assert code_size(everything) > 1.5 * code_size(deferred)


def loaded(module, values):
    return replace(module, text=with_constants(module.text, values))


def code_size(module):
    """Bytes of the assembled kernel."""
    return elf_section_size(cubin(module.text, module.arch), b".text.k")


def elf_section_size(elf, name):
    offset, (entry_size, count, names) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, offset + i * entry_size) for i in range(count)]
    text = elf[headers[names][4] :]
    return next(size for at, _, _, _, _, size in headers if text[at:].startswith(name + b"\0"))


def test_a_constant_decides_how_many_threadgroups_stay_resident():
    text = """constant bool few [[function_constant(7)]];
    kernel [[max_total_threads_per_threadgroup(64)]] void k(device int* o [[buffer(0)]]) {
      mslc::keep_resident<5, 7>();
      o[0] = few;
    }"""
    deferred = deferred_ptx(text).text
    assert ".minnctapersm mslc_function_constant_7_keeps_5\n" in deferred
    for few, least in ((False, 1), (True, 5)):
        assert f".minnctapersm {least}\n" in with_constants(deferred, {7: few})
        assert f".minnctapersm {least}\n" in ptx(text, constants={7: few}).text


def test_deferred_constant_must_be_a_bool():
    text = "constant int n [[function_constant(3)]]; kernel void k(device int* o [[buffer(0)]]) { o[0] = n; }"
    with pytest.raises(CompileError, match="must be a bool, not a int"):
        deferred_ptx(text)
