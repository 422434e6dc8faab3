"""The files of assembled kernels beside the extension, one per op: tools/build_ptx.py and tools/build_cubins.py write them,
_cuda.py reads them. Imports nothing of the package, whose extension is not there yet while it is built.

A kernel is, in all of them, a line that tells which bindings its parameters are (`// bindings 0 1 2 4`, since a kernel need not
use every index) and then what the driver loads.
"""

import io
import lzma
import re
import tarfile
from collections.abc import Mapping

_HEAD = "//! "
_SPECIALISED = re.compile(r"(.*?)((?:_c\d+[tf])*)")
_CONSTANT = re.compile(r"_c(\d+)([tf])")


def parse_key(key: str) -> tuple[str, dict[int, bool]]:
    """Of a pipeline key, such as rope_one_float16_c0t_c1f: the kernel's name and the values of its function constants."""
    found = _SPECIALISED.fullmatch(key)
    assert found, key
    name, constants = found.groups()
    return name, {int(index): value == "t" for index, value in _CONSTANT.findall(constants)}


def pack_ptx(modules: Mapping[str, str]) -> bytes:
    """Text modules by the names of their kernels, in an xz file."""
    text = "".join(f"{_HEAD}{name}\n{module}" for name, module in sorted(modules.items()))
    return lzma.compress(text.encode(), preset=9)


def unpack_ptx(data: bytes) -> dict[str, str]:
    modules = (module.partition("\n") for module in lzma.decompress(data).decode().split(_HEAD)[1:])
    return {name: body for name, _, body in modules}


def cubins_name(op: str, architecture: str) -> str:
    return f"{op}.{architecture}.tar.xz"


def pack_cubins(cubins: Mapping[str, bytes]) -> bytes:
    """Machine code of one architecture by pipeline keys, in a .tar.xz; the same bytes for the same cubins. Together, since those of
    one kernel are much alike."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for key, body in sorted(cubins.items()):
            member = tarfile.TarInfo(key)  # without owner and time
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return lzma.compress(packed.getvalue(), preset=9)


def unpack_cubins(data: bytes) -> dict[str, bytes]:
    cubins = {}
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as archive:
        for member in archive:
            body = archive.extractfile(member)
            assert body, f"{member.name} is no file"
            cubins[member.name] = body.read()
    return cubins
