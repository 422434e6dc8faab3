"""Damaged caches, wrong settings, and files that are not text."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_anvil.mslc import Library, Source, ToolchainError, toolchain
from mlx_anvil.mslc.launches import LaunchError, load_launches
from tests.mslc.msl import HEAD

SOURCE = HEAD + "kernel void k(device int* o [[buffer(0)]]) { *o = 7; }\n"
RUNTIME = ("libmslc_runtime.so", "libmslc_runtime.digest")
SHIM = ("shim.pch", "shim.digest")
FILES = ("k.so", "k.ii", "k.json", "manifest", *RUNTIME, *SHIM)


def result(source=SOURCE):
    out = np.zeros(1, np.int32)
    Library(source).run("k", {0: out}, (1,), (1,))
    return out[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache, and the names of its files as FILES calls them."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_ANVIL_CACHE", str(cache))
        assert result() == 7
    names = {}
    for path in (cache / "mslc").iterdir():
        stem = next((stem for stem in ("libmslc_runtime", "shim") if path.name.startswith(stem)), "k")
        names["manifest" if path.suffix == ".manifest" else stem + path.suffix] = path.name
    assert sorted(names) == sorted(FILES)
    return {kind: (name, (cache / "mslc" / name).read_bytes()) for kind, name in names.items()}


@pytest.mark.alike("damage")  # one comparison of digests finds all of them
@pytest.mark.parametrize("damage", ["truncated", "empty", "zeros", "missing", "other JSON"])
@pytest.mark.parametrize("kind", FILES)
def test_damaged_file_of_the_cache_is_made_again(built, tmp_path, monkeypatch, kind, damage):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))
    folder = tmp_path / "mslc"
    folder.mkdir()
    for other, (name, contents) in built.items():
        damaged = {
            "truncated": contents[: len(contents) // 2],
            "empty": b"",
            "zeros": bytes(len(contents)),
            "other JSON": b"[]",
        }
        if other == "k.json" and kind in SHIM:
            continue  # so that the kernel is compiled again, with the shim
        if other != kind or damage != "missing":
            (folder / name).write_bytes(damaged[damage] if other == kind else contents)
    assert result() == 7
    name, contents = built[kind]
    if kind not in ("manifest", "k.json"):  # whose order and digests may differ
        assert (folder / name).read_bytes() == contents
    assert not [path for path in folder.iterdir() if path.name not in {n for n, _ in built.values()}]


def test_precompiled_shims_that_nothing_uses_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))
    (tmp_path / "mslc").mkdir()
    files = {
        age: [tmp_path / "mslc" / f"shim-{age}.{suffix}" for suffix in ("pch", "digest")] for age in ("old", "new")
    }
    for path in (*files["old"], *files["new"]):
        path.touch()
    for path in files["old"]:
        os.utime(path, (0, 0))
    assert result() == 7
    assert [path.exists() for age in files for path in files[age]] == [False, False, True, True]


def test_precompiled_shim_that_is_deleted_while_a_process_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))
    assert result() == 7
    for path in (tmp_path / "mslc").glob("shim-*"):
        path.unlink()
    assert result(SOURCE.replace("7", "8")) == 8


def run(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "mlx_anvil.mslc", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


LAUNCH = ("run", "k.metal", "k", "0=zeros:int32:1", "--grid", "1", "--threadgroup", "1")


def test_folder_for_the_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "k.metal").write_text(SOURCE)
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("MLX_ANVIL_CACHE", str(given))
        with pytest.raises(ToolchainError, match=re.escape(f"MLX_ANVIL_CACHE is '{given}'")) as error:
            Library(tmp_path / "k.metal")
        assert "Not a directory" in str(error.value)
        assert "it must name a folder that mslc can create or write" in str(error.value)
    failed = run(*LAUNCH, cwd=tmp_path)
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", f"{error.value}\n")


def test_cache_without_room(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_ANVIL_CACHE", str(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toolchain.os, "replace", full)
    with pytest.raises(ToolchainError, match=r"MLX_ANVIL_CACHE is .*No space left on device"):
        Library(SOURCE)
    monkeypatch.undo()
    assert list(tmp_path.rglob("*.*")) == []  # nothing half written


def test_users_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("MLX_ANVIL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ToolchainError, match="MLX_ANVIL_CACHE can name another folder"):
        Library(SOURCE)


def test_cache_in_a_relative_folder_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_ANVIL_CACHE", "kept")
    library = Library(SOURCE)
    monkeypatch.chdir("/")
    assert library.compiled.path.is_relative_to(tmp_path / "kept")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/nowhere/zig", "which is not an executable file"),
        ("no-such-command", "which is not an executable file"),
        ("{folder}", "which is not an executable file"),
        ("{folder}/text", "which is not an executable file"),
        ("{folder}/broken", "which is not zig"),
        (sys.executable, "which is not zig"),
    ],
)
def test_wrong_compiler(tmp_path, monkeypatch, given, words):
    (tmp_path / "k.metal").write_text(SOURCE)
    (tmp_path / "text").write_text("zig")
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    given = given.format(folder=tmp_path)
    failed = run(*LAUNCH, cwd=tmp_path, MLX_ANVIL_ZIG=given)
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        f"MLX_ANVIL_ZIG is '{given}', {words}: it must be the path or the command name of a zig"
    )
    assert "Traceback" not in failed.stderr


def test_compiler_by_path_and_by_command(monkeypatch):
    zig = Path(toolchain.find_zig())
    monkeypatch.setenv("PATH", str(zig.parent), prepend=os.pathsep)
    for given in (str(zig), zig.name):
        toolchain.find_zig.cache_clear()
        monkeypatch.setenv("MLX_ANVIL_ZIG", given)
        assert Path(toolchain.find_zig()) == zig
    toolchain.find_zig.cache_clear()


@pytest.mark.parametrize(
    ("contents", "place", "byte"),
    [
        (b"MTLB\x01\x80\x02\x00", "1:6", "0x80"),  # as a metallib begins
        (b"kernel void k() {}\n// caf\xe9\n", "2:7", "0xe9"),
        (b"kernel void k() {}\n\n\0\0", "3:1", "0x00"),
        ("kernel void k() {}".encode("utf-16"), "1:1", "0xff"),
    ],
)
def test_source_that_is_no_text(tmp_path, contents, place, byte):
    (tmp_path / "bad.metal").write_bytes(contents)
    (tmp_path / "k.metal").write_text(SOURCE)
    message = f"bad.metal:{place}: error: byte {byte} is not text: a Metal source is a text file in UTF-8"
    with pytest.raises(ValueError, match=re.escape(message)):
        Source.load(tmp_path / "bad.metal")
    if byte != "0x80":
        return
    checked = run("check", "bad.metal", "k.metal", cwd=tmp_path)
    assert checked.returncode == 1
    assert checked.stderr == f"{message}\nbad.metal: 1 error\nk.metal: 0 errors\n"
    for command in (["list", "bad.metal"], ["run", "bad.metal", *LAUNCH[2:]], ["profile", "bad.metal", *LAUNCH[2:]]):
        assert run(*command, cwd=tmp_path).stderr == message + "\n"
    assert run("ptx", "bad.metal", "-o", "ptx", cwd=tmp_path).stderr == f"bad.metal: {message}\n"


def test_header_that_is_no_text(tmp_path):
    (tmp_path / "bad.h").write_bytes(b"int f();\n\xff\xfe\0;\n")
    from mlx_anvil.mslc.diagnostics import CompileError

    with pytest.raises(CompileError) as error:
        Library(Source.load(HEAD + '#include "bad.h"\nkernel void k() {}\n', [tmp_path]))
    first = error.value.diagnostics[0]
    assert (first.file, first.line) == (str(tmp_path / "bad.h"), 2)


@pytest.mark.parametrize("name", ["launch.toml", "launch.json"])
def test_launch_description_that_is_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match=name):
        load_launches(tmp_path / name)
