"""Cubins of the kernels that models launch: how tools/build_cubins.py makes them of the package's PTX, and which one a
device gets."""

import lzma
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_anvil
from mlx_anvil import _cuda
from mlx_anvil._kernel_files import pack_cubins, pack_ptx, unpack_cubins, unpack_ptx
from tests.mslc.ptx_support import METAL, needs_metal, needs_ptxas

pytestmark = [pytest.mark.cpu_only, needs_ptxas, needs_metal]

OP, KEY = "rope", "rope_qk_bfloat16_c0t_c1f_c2t_c3f_c4f"
EM_CUDA = 190  # of ELF


def run_tool(name: str, *arguments: object) -> str:
    command = [sys.executable, METAL / "tools" / f"{name}.py", "--root", METAL, *arguments]
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cubins of one op, as in the package."""
    folder = tmp_path_factory.mktemp("built")
    run_tool("build_ptx", "--output", folder / "ptx", "--op", OP)
    printed = run_tool("build_cubins", "--ptx", folder / "ptx", "--output", folder / "cubin", "--op", OP)
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["sm_80", "sm_90", "sm_100"]
    return folder


def forget() -> None:
    for kept in (_cuda._modules, _cuda._cubins, _cuda.architectures):
        kept.cache_clear()


@pytest.fixture
def installed(built: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs the cubins as if they were beside the extension."""
    monkeypatch.setattr(_cuda, "FOLDER", built / "ptx")
    monkeypatch.setattr(_cuda, "CUBINS", built / "cubin")
    monkeypatch.delenv("MLX_ANVIL_CUBINS", raising=False)
    forget()
    yield
    forget()


def architecture_of(image: bytes) -> int:
    """The architecture of an ELF image, by the machine and flags of its header."""
    assert image.startswith(b"\x7fELF")
    machine, flags = struct.unpack_from("<H", image, 18)[0], struct.unpack_from("<I", image, 48)[0]
    assert machine == EM_CUDA
    abi_version = image[8]  # since CUDA 13: 8, and the architecture is the second byte of the flags
    return flags >> 8 & 0xFF if abi_version >= 8 else flags & 0xFF


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100")],
)
def test_a_device_gets_the_cubin_of_its_generation(installed, capability, architecture):
    given, module = _cuda._cubin(OP, KEY, *capability)
    assert given == architecture
    bindings, _, image = module.partition(b"\n")
    assert bindings.decode() == _cuda._ptx(OP, "rope_qk_bfloat16").partition("\n")[0]
    assert bindings.startswith(b"// bindings 0 1 2")
    assert architecture_of(image) == int(architecture.removeprefix("sm_"))
    assert b"\0rope_qk_bfloat16\0" in image  # the name that the driver is asked for


@pytest.mark.parametrize(
    ("op", "key", "capability"),
    [
        (OP, KEY, (7, 5)),
        (OP, KEY, (12, 0)),  # newer: takes the PTX
        (OP, KEY.replace("c0t", "c0f"), (9, 0)),  # not in the list
        ("silu_gate", "silu_gate_forward_float16_flat_c0t", (9, 0)),  # an op without a file
    ],
)
def test_others_get_none(installed, op, key, capability):
    assert _cuda._cubin(op, key, *capability) == ("", b"")


def test_an_older_minor_version_is_not_enough(monkeypatch):
    monkeypatch.setattr(_cuda, "architectures", lambda: ("sm_86",))
    monkeypatch.setattr(_cuda, "_cubins", lambda op, architecture: {KEY: b"code"})
    assert _cuda._cubin(OP, KEY, 8, 9) == ("sm_86", b"code")
    assert _cuda._cubin(OP, KEY, 8, 0) == ("", b"")


def test_a_variable_turns_them_off(installed, monkeypatch):
    assert mlx_anvil.info()["backends"]["cuda"]["detail"].endswith("cubins for sm_80, sm_90, sm_100")
    monkeypatch.setenv("MLX_ANVIL_CUBINS", "0")
    forget()
    assert _cuda._cubin(OP, KEY, 9, 0) == ("", b"")
    assert "cubin" not in mlx_anvil.info()["backends"]["cuda"]["detail"]


def test_constants_are_in_the_code(installed):
    """Each cubin contains one of the two ways to pair elements, so all cubins differ."""
    listed = [line for line in (METAL / "tools" / "cubins.txt").read_text().splitlines() if line.startswith(f"{OP}/")]
    cubins = _cuda._cubins(OP, "sm_90")
    assert {f"{OP}/{key}" for key in cubins} == set(listed)
    assert len(set(cubins.values())) == len(listed)


@pytest.mark.slow
def test_builds_are_reproducible_and_say_what_they_leave_out(built, tmp_path):
    printed = run_tool(
        "build_cubins", "--ptx", built / "ptx", "--output", tmp_path, "--op", OP, "--arch", "sm_90", "--arch", "sm_31"
    )
    assert "sm_31: skipped, " in printed
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == (built / "cubin" / path.name).read_bytes()


def test_files_give_back_what_was_packed():
    cubins = {f"kernel_c{i}t": b"// bindings 0\n" + bytes(range(i, 200)) for i in range(3)}
    assert unpack_cubins(pack_cubins(cubins)) == cubins
    assert pack_cubins(dict(reversed(cubins.items()))) == pack_cubins(cubins)
    modules = {"a": "// bindings 0 1\n.version 7.8\n", "b": "// bindings 1\n.version 7.8\n"}
    assert unpack_ptx(pack_ptx(modules)) == modules
    with pytest.raises(lzma.LZMAError):
        unpack_cubins(pack_cubins(cubins)[:-9] + bytes(9))
