"""Writes kernel_source.cpp: the Metal source of every op, its includes resolved, for the host code.

One text per op: all its .metal files, with each of our headers in front of its first use. Line markers keep
compiler messages pointing at the files that people edit.
"""

import argparse
import re
from pathlib import Path

INCLUDE = re.compile(r'^\s*#include "(metal/[^"]+)"')
PRAGMA_ONCE = re.compile(r"^\s*#pragma once\s*$")
# Compilers limit the length of one string literal; longer text is written as several, side by side.
LITERAL_LIMIT = 8000


def resolve(root: Path, name: str, seen: set[str]) -> list[str]:
    """The lines of one file with our own includes put in their place."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((root / name).read_text().splitlines(), start=1):
        include = INCLUDE.match(line)
        if include and include[1] not in seen:
            seen.add(include[1])
            lines += resolve(root, include[1], seen)
            lines.append(f'#line {number + 1} "{name}"')
        elif include or PRAGMA_ONCE.match(line):
            lines.append("")  # keeps the line numbers
        else:
            lines.append(line)
    return lines


def literals(text: str) -> str:
    """`text` as adjacent C++ raw string literals."""
    pieces = [text[i : i + LITERAL_LIMIT] for i in range(0, len(text), LITERAL_LIMIT)]
    return "\n".join(f'      R"MSL({piece})MSL"' for piece in pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder that holds metal/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("sources", type=Path, nargs="+", help=".metal files: metal/<op>/<name>.metal")
    args = parser.parse_args()

    by_op: dict[str, list[str]] = {}
    seen: dict[str, set[str]] = {}
    for source in sorted(args.sources):
        op = source.parent.name
        name = source.resolve().relative_to(args.root.resolve()).as_posix()
        by_op.setdefault(op, []).extend(resolve(args.root, name, seen.setdefault(op, set())))

    cases = [
        f'  if (op == "{op}") {{\n    return\n{literals(chr(10).join(lines) + chr(10))};\n  }}'
        for op, lines in by_op.items()
    ]
    body = "\n".join(cases)
    args.output.write_text(
        "// Written by tools/embed_metal.py.\n"
        '#include "common/launch.h"\n\n'
        "namespace mlx_anvil {\n\n"
        f'std::string kernel_source(const std::string& op) {{\n{body}\n  return "";\n}}\n\n'
        "}  // namespace mlx_anvil\n"
    )


if __name__ == "__main__":
    main()
