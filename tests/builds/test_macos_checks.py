"""The checks of a macOS build (tools/macos) name each mistake, made here on purpose."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

import check
import compiler
import macho
import sdk
import system

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not compiler.linker(), reason="needs LLVM's linker for Mach-O (Debian: lld)"),
]

NEWER_THAN_MACOS_14 = "__ZNSt3__113__hash_memoryEPKvm"  # libc++ 21's hash of a string
NOT_IN_LIBMLX = "__ZN3mlx4core14get_block_dimsEiiii"


@pytest.fixture(scope="module")
def exports() -> check.Exports:
    return check.Exports.of_macos()


@pytest.fixture(scope="module")
def sdk_folder() -> Path:
    return sdk.make()


def module_calling(symbols: list[str], sdk_folder: Path, folder: Path) -> macho.Binary:
    """A module that calls functions of these names, linked without checking that they exist."""
    source = folder / "module.cpp"
    declared = "\n".join(f'extern "C" void f{i}() __asm__("{s}");' for i, s in enumerate(symbols))
    calls = " ".join(f"f{i}();" for i in range(len(symbols)))
    visible = '__attribute__((visibility("default")))'
    source.write_text(f'{declared}\nextern "C" {visible} void PyInit__ext() {{ {calls} }}\n')
    cxx = str(sdk_folder / "bin" / "c++")
    compiled, module = folder / "module.o", folder / "_ext.so"
    subprocess.run([cxx, "-fvisibility=hidden", "-c", str(source), "-o", str(compiled)], check=True)
    allowed = [f"-Wl,-U,{symbol}" for symbol in symbols]
    subprocess.run([cxx, "-bundle", *allowed, str(compiled), "-o", str(module)], check=True)
    return macho.read(module)


@pytest.mark.slow
def test_symbols_that_exist_are_no_problem(sdk_folder, tmp_path, exports):
    module = module_calling(["_PyTuple_New", "__Znwm"], sdk_folder, tmp_path)
    assert set(module.imports) >= {"_PyTuple_New", "__Znwm"}
    assert [check.wrong_import(*item, exports) for item in module.imports.items()] == [None] * len(module.imports)


@pytest.mark.parametrize(
    ("symbol", "complaint"),
    [
        (NEWER_THAN_MACOS_14, f"{NEWER_THAN_MACOS_14}: not known to be in {system.LIBCXX} of macOS 14, may be newer"),
        (NOT_IN_LIBMLX, f"{NOT_IN_LIBMLX}: libmlx.dylib does not export it"),
        ("_PyTuple_Renew", "_PyTuple_Renew: CPython does not export it"),
    ],
)
def test_import_that_nothing_exports(symbol, complaint, sdk_folder, tmp_path, exports):
    module = module_calling([symbol], sdk_folder, tmp_path)
    library = check.LIBMLX if symbol == NOT_IN_LIBMLX else module.imports[symbol]
    module = dataclasses.replace(module, imports={symbol: library})
    assert complaint in check.problems(module, exports)


def test_linker_names_a_missing_symbol(sdk_folder, tmp_path):
    source, compiled = tmp_path / "module.cpp", tmp_path / "module.o"
    source.write_text(f'extern "C" void newer() __asm__("{NEWER_THAN_MACOS_14}");\nvoid f() {{ newer(); }}\n')
    cxx = str(sdk_folder / "bin" / "c++")
    subprocess.run([cxx, "-c", str(source), "-o", str(compiled)], check=True)
    linked = [cxx, "-bundle", str(compiled), "-o", str(tmp_path / "module.so")]
    result = subprocess.run(linked, capture_output=True, text=True)
    assert result.returncode != 0
    assert "undefined symbol: std::__1::__hash_memory(void const*, unsigned long)" in result.stderr


def test_newer_function_of_libcxx_does_not_compile(sdk_folder, tmp_path):
    source = tmp_path / "newer.cpp"
    source.write_text(
        '#include <charconv>\nbool f(double& x) { return std::from_chars("1", 0, x).ec == std::errc{}; }\n'
    )
    command = [str(sdk_folder / "bin" / "c++"), "-std=c++20", "-c", str(source), "-o", str(tmp_path / "newer.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "from_chars" in result.stderr


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"minimum_os": (15, 0, 0)}, "made for MACOS (15, 0, 0), not for MACOS (14, 0)"),
        ({"exports": frozenset({check.INIT, "_helper"})}, f"exports {check.INIT}, _helper; it should export"),
        ({"libraries": ("/usr/lib/libz.dylib",)}, "loads /usr/lib/libz.dylib"),
        ({"run_paths": ()}, "looks for libmlx in ()"),
        ({"imports": {}}, "has no Metal backend"),
    ],
)
def test_other_properties(change, complaint, sdk_folder, tmp_path, exports):
    module = dataclasses.replace(module_calling([], sdk_folder, tmp_path), **change)
    assert any(problem.startswith(complaint) for problem in check.problems(module, exports))


def test_nanobind_of_another_version(sdk_folder, tmp_path, exports):
    module = module_calling([], sdk_folder, tmp_path)
    with module.path.open("ab") as file:
        file.write(b"\0nanobind_system_libcpp_abi1_a1_v21\0")
    expected = "nanobind's ABI tag is nanobind_system_libcpp_abi1_a1_v21; that of mlx.core is nanobind_system_libcpp"
    assert any(problem.startswith(expected) for problem in check.problems(module, exports))
