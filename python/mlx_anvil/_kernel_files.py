"""The format of the kernel files beside the extension, one per op. tools/build_ptx.py and tools/build_cubins.py write
them, _cuda.py reads them. This module imports nothing of the package, because it runs before the extension exists.

Each kernel starts with a line that maps its parameters to bindings, such as `// bindings 0 1 2 4`, because a kernel may
skip an index. The image that the driver loads follows.
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
    """Splits a pipeline key, such as rope_one_float16_c0t_c1f, into the kernel's name and its function constants."""
    found = _SPECIALISED.fullmatch(key)
    assert found, key
    name, constants = found.groups()
    return name, {int(index): value == "t" for index, value in _CONSTANT.findall(constants)}


def pack_ptx(modules: Mapping[str, str]) -> bytes:
    """Packs PTX modules, keyed by kernel name, into an xz file."""
    text = "".join(f"{_HEAD}{name}\n{module}" for name, module in sorted(modules.items()))
    return lzma.compress(text.encode(), preset=9)


def unpack_ptx(data: bytes) -> dict[str, str]:
    """The inverse of :func:`pack_ptx`."""
    modules = (module.partition("\n") for module in lzma.decompress(data).decode().split(_HEAD)[1:])
    return {name: body for name, _, body in modules}


def cubins_name(op: str, architecture: str) -> str:
    """File name of an op's cubins."""
    return f"{op}.{architecture}.tar.xz"


def pack_cubins(cubins: Mapping[str, bytes]) -> bytes:
    """Packs the cubins of one architecture, keyed by pipeline, into a .tar.xz whose bytes are reproducible. One archive
    holds all of them, because the cubins of one kernel compress well together.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for key, body in sorted(cubins.items()):
            member = tarfile.TarInfo(key)  # a new TarInfo has no owner and no time
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return lzma.compress(packed.getvalue(), preset=9)


def unpack_cubins(data: bytes) -> dict[str, bytes]:
    """The inverse of :func:`pack_cubins`."""
    cubins = {}
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as archive:
        for member in archive:
            body = archive.extractfile(member)
            assert body, f"{member.name} is not a file"
            cubins[member.name] = body.read()
    return cubins
