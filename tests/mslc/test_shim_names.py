"""mslc provides exactly the names whose source is documented."""

import re
from pathlib import Path

import pytest

from mlx_anvil.mslc import Source, attestation
from mlx_anvil.mslc.compiler import LANGUAGE_FLAGS, PRECISION_FLAGS, RELAXED_SPACES, run_preprocessor, run_rewriter
from mlx_anvil.mslc.toolchain import SHIM, require, run_tool

PAGE = Path(__file__).parents[2] / "docs" / "mslc-standard-library.md"
EVERYTHING = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
"""
INTERNAL = "__metal_"  # of Apple's compiler; MLX's headers call them
OF_THE_REWRITER = "mslc_"
NESTED = {"fast", "precise"}


def declared(namespace: str) -> set[str]:
    """The names that the headers declare in a namespace, without operators."""
    source = Source.load(EVERYTHING, defines={"__METAL_VERSION__": 400})
    text = run_rewriter(source, run_preprocessor(source)).text
    flags = [*LANGUAGE_FLAGS, "-include", str(SHIM / "mslc.h"), *PRECISION_FLAGS, *RELAXED_SPACES, "-fsyntax-only"]
    lookups = ["-Xclang", "-ast-dump-lookups", "-Xclang", f"-ast-dump-filter={namespace}"]
    result = run_tool(["clang", *flags, *lookups, "-"], text=text)
    require(result, "listing names")
    block = result.stdout.split("StoredDeclsMap Namespace")[1]
    return {name for name in re.findall(r"DeclarationName '(\w+)'", block) if not name.startswith(OF_THE_REWRITER)}


def documented() -> set[str]:
    """The code in the middle column of the tables for types and functions, and in the last for names without a
    section."""
    tables, _, rest = PAGE.read_text().partition("## Names without a section")
    rows = [line.split("|") for line in tables.splitlines() if line.startswith("|")]
    others = [line.split("|") for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = " ".join(row[2] for row in (*rows, *others))
    return {name for item in re.findall(r"`([^`]+)`", cells) for name in attestation.expanded(item)}


@pytest.mark.parametrize("space", ["metal", "metal::fast", "metal::precise", "mpp::tensor_ops"])
def test_names_are_those_of_the_page(space):
    prefix = re.sub("^metal(::)?", "", space)
    expected = {name.removeprefix(f"{prefix}::") for name in documented() if name.rpartition("::")[0] == prefix}
    names = {name for name in declared(space) if not name.startswith("__")} - (NESTED if space == "metal" else set())
    assert names - expected == set(), "in the headers only"
    assert expected - names - {INTERNAL} == set(), "on the page only"


def test_internal_names_are_called_by_the_headers_of_mlx():
    internal = {name for name in declared("metal") if name.startswith("__")}
    known = attestation.attested().words
    assert internal
    assert {name for name in internal if not name.startswith(INTERNAL) or name not in known} == set()


@pytest.mark.parametrize(
    ("item", "names"),
    [("a", ["a"]), ("a{b c}d", ["abd", "acd"]), ("{a b}{2 3}x", ["a2x", "a3x", "b2x", "b3x"])],
)
def test_braces_expand(item, names):
    assert attestation.expanded(item) == names


@pytest.mark.parametrize("name", ["move", "swap", "decay_t", "is_base_of_v", "any_vec", "atomic_value", "conjunction"])
def test_names_without_a_source_are_gone(name):
    assert name not in declared("metal")
