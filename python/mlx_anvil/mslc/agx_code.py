"""Reads the machine code that Mesa prints, and sorts its instructions by what they do."""

from __future__ import annotations

import re
from collections import Counter

# In the order of the table. The first pattern that matches the whole name of an instruction decides.
CLASSES = {
    "matrix": r"matrix_fma",
    "float": r"[fh](add|mul|fma)|fcmpsel|floor|ceil|trunc|roundeven",
    "special": r"rcp|rsqrt|srsqrt|log2|exp2|sin_pt_[12]",
    "integer": r"i(add|mad|cmpsel|ntl)|bitop|not|and|or|xor|bfi|bfeil|extr|asr|signext|bitrev|popcount|ffs",
    "convert": r"convert",
    "move": r"mov|mov_imm|swap|get_sr\w*|uniform_store",
    "device memory": r"device_(load|store)|atomic",
    "threadgroup": r"local_(load|store|atomic)",
    "SIMD group": r"(quad_|simd_)?(shuffle|reduce|prefix)\w*|\w*ballot",
    "spill": r"stack_(load|store|adjust)",
    "branch": r"(if|else|while)_[if]cmp|(push|pop)_exec|jmp_\w+|break\w*|begin_cf|stop|logical_end",
    "wait": r"wait\w*|\w*barrier\w*|doorbell",
}
OTHER = "other"

_START = re.compile(r"^(?=block0 \{$)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^   (?:[^=\n]*? = )?([a-z]\w*)", re.MULTILINE)
# How Mesa writes a copy, and a swap of two registers.
_COPY = re.compile(r"= bitop (\S+), #0, #a$", re.MULTILINE)
_SWAP = re.compile(r"^   (\S+) = xor \1, (\S+)\n   \2 = xor \1, \2\n   \1 = xor \1, \2\n", re.MULTILINE)


def machine_code(dump: str) -> str:
    """Returns the last listing of the main program, or nothing.

    Mesa prints a program three times on its way, and also a preamble, which runs once for all threads and does nothing
    but fill uniform registers.
    """
    for listing in _START.split(dump)[3::3]:
        if "uniform_store" not in listing:
            return listing[: listing.rindex("}")] + "}\n"
    return ""


def opcodes(code: str) -> Counter[str]:
    return Counter(_INSTRUCTION.findall(_COPY.sub(r"= mov \1", _SWAP.sub("   swap\n" * 3, code))))


def instruction_classes(code: str) -> dict[str, int]:
    """Returns the number of instructions of every class; those that Mesa names differently are `other`."""
    counts = dict.fromkeys((*CLASSES, OTHER), 0)
    for name, count in opcodes(code).items():
        counts[class_of(name)] += count
    return counts


def class_of(opcode: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.fullmatch(pattern, opcode)), OTHER)
