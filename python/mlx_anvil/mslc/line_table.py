"""Maps instructions of a compiled library to source lines. Reads the parts of ELF and DWARF 4 needed for that."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


class LineTable:
    """The line table of a shared library compiled with -gdwarf-4."""

    def __init__(self, path: Path):
        self._data = path.read_bytes()
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        self.sections = self._read_sections()

    def find(self, return_address: int) -> tuple[str, int, int] | None:
        """Returns (file, line, column) of the call that returns to an address, which is relative to the load
        address."""
        addresses, places = self._rows
        index = bisect.bisect_right(addresses, return_address - 1) - 1
        place = places[index] if index >= 0 else None
        return place if place and place[1] else None

    @cached_property
    def symbols(self) -> dict[str, int]:
        """The addresses of the exported symbols."""
        names, table = self.sections[".dynstr"], self.sections[".dynsym"]
        found = {}
        for name, _info, _other, _section, value, _size in struct.iter_unpack("<IBBHQQ", table):
            found[names[name : names.index(b"\0", name)].decode()] = value
        return found

    @cached_property
    def _rows(self) -> tuple[list[int], list[tuple[str, int, int] | None]]:
        """All rows, sorted by address. A row applies up to the next one; None ends a sequence."""
        rows = [row for unit in _units(self.sections.get(".debug_line", b"")) for row in unit.rows()]
        rows.sort(key=lambda row: row[0])
        return [address for address, _ in rows], [place for _, place in rows]

    def _read_sections(self) -> dict[str, bytes]:
        (offset,) = struct.unpack_from("<Q", self._data, 40)
        size, count, names_index = struct.unpack_from("<HHH", self._data, 58)
        headers = [struct.unpack_from("<IIQQQQ", self._data, offset + i * size) for i in range(count)]
        contents = [self._data[h[4] : h[4] + h[5]] for h in headers]
        names = contents[names_index]
        return {
            names[h[0] : names.index(b"\0", h[0])].decode(): data for h, data in zip(headers, contents, strict=True)
        }


class _Reader:
    """Reads values from bytes and advances its position."""

    def __init__(self, data: bytes, at: int = 0, end: int | None = None):
        self.data, self.at, self.end = data, at, len(data) if end is None else end

    def unpack(self, layout: str) -> int:
        (value,) = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return value

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def signed(self) -> int:
        start = self.at
        value = self.unsigned()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


def _units(section: bytes) -> Iterator[_Unit]:
    at = 0
    while at < len(section):
        (length,) = struct.unpack_from("<I", section, at)
        yield _Unit.read(_Reader(section, at + 4, at + 4 + length))
        at += 4 + length


@dataclass
class _Unit:
    """A line number program (DWARF 4, section 6.2)."""

    program: _Reader
    minimum_length: int
    line_base: int
    line_range: int
    operand_counts: list[int]  # of the standard opcodes
    files: list[str]

    @classmethod
    def read(cls, reader: _Reader) -> _Unit:
        version = reader.unpack("H")
        if version != 4:
            raise ValueError(f"line table version {version} instead of 4")
        header_length = reader.unpack("I")
        program = reader.at + header_length
        minimum_length = reader.unpack("B")
        reader.unpack("B")  # maximum operations per instruction
        reader.unpack("B")  # default_is_stmt
        line_base, line_range, opcode_base = reader.unpack("b"), reader.unpack("B"), reader.unpack("B")
        operand_counts = [reader.unpack("B") for _ in range(opcode_base - 1)]
        directories = [""]
        while directory := reader.string():
            directories.append(directory)
        files = [""]
        while name := reader.string():
            directory = directories[reader.unsigned()]
            reader.unsigned(), reader.unsigned()  # time and size
            files.append(name if not directory or name.startswith("/") else f"{directory}/{name}")
        return cls(
            _Reader(reader.data, program, reader.end), minimum_length, line_base, line_range, operand_counts, files
        )

    def rows(self) -> Iterator[tuple[int, tuple[str, int, int] | None]]:
        program, opcode_base = self.program, len(self.operand_counts) + 1
        address, file, line, column = 0, 1, 1, 0
        while program.at < program.end:
            opcode = program.unpack("B")
            if opcode >= opcode_base:  # special opcode: advances both and adds a row
                step, advance = divmod(opcode - opcode_base, self.line_range)
                address += step * self.minimum_length
                line += self.line_base + advance
                yield address, (self.files[file], line, column)
            elif opcode == 0:  # extended opcode
                length = program.unsigned()
                after = program.at + length
                extended = program.unpack("B")
                if extended == 1:  # end of sequence
                    yield address, None
                    address, file, line, column = 0, 1, 1, 0
                elif extended == 2:  # set address
                    address = program.unpack("Q")
                program.at = after
            elif opcode == 1:  # copy
                yield address, (self.files[file], line, column)
            elif opcode == 2:
                address += program.unsigned() * self.minimum_length
            elif opcode == 3:
                line += program.signed()
            elif opcode == 4:
                file = program.unsigned()
            elif opcode == 5:
                column = program.unsigned()
            elif opcode == 8:  # advance like special opcode 255
                address += (255 - opcode_base) // self.line_range * self.minimum_length
            elif opcode == 9:
                address += program.unpack("H")
            else:
                for _ in range(self.operand_counts[opcode - 1]):
                    program.unsigned()
