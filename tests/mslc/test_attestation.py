"""Attestation: which spellings count as known to compile, where unknown ones are reported, and the tables behind it."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_anvil.mslc import Source, attestation
from mlx_anvil.mslc.commands.check import command
from mlx_anvil.mslc.compiler import run_preprocessor

ROOT = Path(__file__).resolve().parents[2]
METAL = ROOT / "metal"
FILES = sorted(path for path in METAL.rglob("*") if path.suffix in attestation.SUFFIXES)
TABLES = [attestation.TABLE, attestation.LIBRARY]
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {{\n  {}\n}}\n"


def unattested(text: str, folders=()) -> list[str]:
    source = Source(text, "mine.metal")
    return [str(d).splitlines()[0] for d in attestation.unattested(source, run_preprocessor(source), folders)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_our_source_is_attested(path):
    """Reads the source as text, so that code inside __MSLC__, which Apple's compiler does not see, is checked too."""
    known = attestation.attested()
    assert sorted({s for s, _ in attestation.spellings(path.read_text()) if not known.knows(s)}) == []


@pytest.mark.parametrize(
    ("text", "place", "spelling"),
    [
        (HEAD + KERNEL.format("x[i] = metal::as_type<float>(i);"), "4:10", "metal::as_type"),
        (HEAD + KERNEL.format("x[i] = metal :: foo(1);"), "4:10", "metal::foo"),
        (HEAD + KERNEL.format("x[i] = ::metal::foo(1);"), "4:12", "metal::foo"),
        (HEAD + KERNEL.format("x[i] = fast::bar(1.0f);"), "4:10", "fast::bar"),
        (HEAD + KERNEL.format("x[i] = __word__(1);"), "4:10", "__word__"),
        (HEAD + "[[made_up]] " + KERNEL.format(""), "3:3", "[[made_up]]"),
        (HEAD + "[[made::up(1, 2)]] " + KERNEL.format(""), "3:3", "[[made::up]]"),
        (HEAD + "[[kernel, made_up]] " + KERNEL.format(""), "3:11", "[[made_up]]"),
        (HEAD + "__attribute__((made_up)) inline void f() {}\n", "3:16", "__attribute__((made_up))"),
        (HEAD + "#pragma whatever\n", "3:1", "#pragma whatever"),
        (HEAD + '_Pragma("whatever") inline void f() {}\n', "3:1", "#pragma whatever"),
        (HEAD + "#if __MADE_UP__\n#endif\n", "3:5", "__MADE_UP__"),
        (HEAD + "#define WORD() metal::foo()\n" + KERNEL.format("WORD();"), "5:3", "metal::foo"),
    ],
)
def test_a_spelling_that_nobody_has_seen_is_found_where_it_stands(text, place, spelling):
    assert any(d.startswith(f"mine.metal:{place}: error: '{spelling}' occurs in no") for d in unattested(text)), (
        unattested(text)
    )


@pytest.mark.parametrize(
    "text",
    [
        "x[i] = metal::sin(fast::exp2(metal::precise::log(1.0f)));",
        "// metal::foo in a comment\n  x[i] = 0; /* __word__ */",
        "#pragma clang loop unroll(full)\n  for (int j = 0; j < 4; ++j) x[j] = j;",
        "x[i] = metal::simd_sum(x[i]); metal::threadgroup_barrier(metal::mem_flags::mem_none);",
    ],
)
def test_what_is_known_passes(text):
    assert unattested(HEAD + KERNEL.format(text)) == []


def test_a_hint_names_the_word_in_another_spelling():
    (found,) = unattested(HEAD + KERNEL.format("x[i] = metal::as_type<float>(i);"))
    assert "'as_type' occurs there in another spelling" in found


def test_an_included_file_is_looked_at(tmp_path):
    (tmp_path / "mine.h").write_text("#pragma once\n#ifdef __MADE_UP__\n#endif\ninline void f() { metal::foo(); }\n")
    source = Source.load(f'{HEAD}#include "mine.h"\n', [tmp_path])
    found = attestation.unattested(source, run_preprocessor(source))
    assert [(Path(d.file).name, d.line, d.column) for d in found] == [("mine.h", 4, 19), ("mine.h", 2, 8)]


def test_a_folder_that_is_known_to_compile_attests(tmp_path):
    (tmp_path / "seen.metal").write_text("kernel void k() { metal::foo(); }\n")
    text = HEAD + KERNEL.format("metal::foo(); metal::bar();")
    assert [d.split("'")[1] for d in unattested(text, [tmp_path])] == ["metal::bar"]


# ---- the command -----------------------------------------------------------------------------------------------------


def check(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(path), *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_checks_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.metal"
    path.write_text(HEAD + KERNEL.format("x[i] = metal::foo(1.0f);"))
    code, output = check(path, "--conformance")
    assert code == 1
    assert f"{path}:4:10: error: 'metal::foo' occurs in no Metal source that is known to compile" in output
    path.write_text(HEAD + KERNEL.format("x[i] = metal::sin(1.0f);"))
    assert check(path, "--conformance") == (0, f"{path}: 0 errors\n")


def test_the_command_takes_a_folder_of_known_source(tmp_path):
    known = tmp_path / "known"
    known.mkdir()
    (known / "seen.h").write_text("[[seen]] void f();\n")
    path = tmp_path / "mine.metal"
    path.write_text(HEAD + "[[seen]] " + KERNEL.format("x[i] = 0;"))
    assert check(path, "--conformance")[0] == 1
    assert check(path, "--conformance", "--attested", str(known))[0] == 0


def test_the_command_takes_versions_of_the_language(tmp_path):
    path = tmp_path / "mine.metal"
    path.write_text(HEAD + KERNEL.format("auto f = [](float a) { return a; }; x[i] = f(1);"))
    assert check(path, "--conformance", "--std", "metal3.2", "--std", "metal4.0")[0] == 0
    code, output = check(path, "--conformance")
    assert code == 1
    assert "Metal has lambdas only since version 3.2 (metal3.1)" in output


@pytest.mark.parametrize("option", [["--std", "metal3.1"], ["--attested", "."]])
def test_options_of_conformance_alone_are_refused(tmp_path, option):
    path = tmp_path / "mine.metal"
    path.write_text(HEAD)
    code, output = check(path, *option)
    assert code == 2
    assert "need --conformance" in output


# ---- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_each_line_says_where_it_was_seen(path):
    for where, names in attestation.table(path).items():
        project = re.fullmatch(r"[\w.-]+/[\w.-]+ [\w+./-]+\.(msl|metal|swift|h)", where)
        assert project or re.match(r"specification \d", where) or where == "mlx-anvil docs/mslc-reference.md", where
        assert names, where
        assert len(set(names)) == len(names), where


def test_the_library_is_that_of_the_specification():
    assert all(where.startswith("specification ") for where in attestation.table(attestation.LIBRARY))


def test_no_line_of_the_table_is_idle():
    """Each line of the table occurs in our source, and not in the headers of the mlx package."""
    listed = [name for names in attestation.table(attestation.TABLE).values() for name in names]
    used = {spelling for path in FILES for spelling, _ in attestation.spellings(path.read_text())}
    directives = {word for path in FILES for word in re.findall(r"\b__\w+", path.read_text())}
    by_mlx = frozenset().union(*(attestation._folder(folder).spellings for folder in attestation._mlx_headers()))
    assert by_mlx
    assert [name for name in listed if name not in used | directives] == []
    assert [name for name in listed if name in by_mlx] == []
