"""The strict check: enforces Metal's address-space rules, which the compiler relaxes for execution."""

from __future__ import annotations

import re

from .compiler import PRECISION_FLAGS, STRICT_SPACES, Constants, run_compiler, run_preprocessor, run_rewriter
from .diagnostics import CompileError, Diagnostic
from .lexer import TokenStream
from .passes.members import qualified_members
from .preprocess import Source
from .rewrite import CPU, Target
from .structure import Structure

_LOG = re.compile(r"no matching (constructor|member function) .*('constant [\w:]*\bos_log'|'log(_\w+)?'$)")

_OBJECT = re.compile(r"cannot initialize object parameter of type .* with an expression of type '(?:const )?(\w+) ")
_CALL = re.compile(r"(?:\.|->)\s*(\w+)\s*\(")


def lint(source: Source, constants: Constants | None = None, target: Target = CPU) -> list[Diagnostic]:
    """Returns the errors and warnings of one file, in the author's vocabulary and positions.

    It drops errors that Metal's compiler would not report. In Metal, the members of packed vectors, bool vectors and
    logs, and the copy constructors of structs, exist for every address space; clang's strict mode has only the plain
    ones. Metal also accepts members qualified with the object's address space, which clang sees without the qualifier.
    """
    preprocessed = ""
    try:
        preprocessed = run_preprocessor(source)
        rewritten = run_rewriter(source, preprocessed, constants, target)
        flags = [*PRECISION_FLAGS, *STRICT_SPACES, "-fsyntax-only", "-ferror-limit=0"]
        found = run_compiler(source, preprocessed, rewritten, flags)
    except CompileError as error:
        found = error.diagnostics
    found = [d for d in found if not d.shim_lacks_space and not _is_struct_copy(d) and not _LOG.search(d.message)]
    if any(space_of_object(d) for d in found):
        stream = TokenStream(preprocessed)
        qualified = qualified_members(stream, Structure(stream))
        found = [d for d in found if not _calls_qualified_member(d, qualified)]
    return found


def space_of_object(diagnostic: Diagnostic) -> str:
    """Returns the address space of the object whose member call is diagnosed, or "" for other diagnostics."""
    match = _OBJECT.match(diagnostic.message)
    return match[1] if match else ""


def _calls_qualified_member(diagnostic: Diagnostic, qualified: frozenset[tuple[str, str]]) -> bool:
    space = space_of_object(diagnostic)
    called = _CALL.search(diagnostic.source_line, diagnostic.column - 1)
    return bool(space) and (called[1] if called else "operator", space) in qualified


def _is_struct_copy(diagnostic: Diagnostic) -> bool:
    """Tells if a diagnostic only reports a copy of a struct from `device` or `constant` memory."""
    if not diagnostic.message.startswith(
        ("no matching constructor", "no viable constructor", "no viable overloaded '='")
    ):
        return False
    candidates = [note.message for note in diagnostic.notes if note.message.startswith("candidate")]
    mentions = [m for m in candidates if "implicit copy" in m or "implicit move" in m]
    return bool(mentions) and any("address space" in m or "would lose" in m for m in mentions)
