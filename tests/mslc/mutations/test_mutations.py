"""Every seeded bug is found at its line. The unchanged kernels have no findings."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_anvil.mslc import Library, SimulationError, checks
from mlx_anvil.mslc.compiler import CHECKED
from tests.mslc.control import mlx_kernels
from tests.mslc.control.mlx_kernels import ENCODE
from tests.mslc.mutations.catalogue import MUTATIONS, WRONG, Mutation
from tests.mslc.mutations.launches import ELEMENTWISE_PARAMS, HERE, ROOT, Launch
from tests.mslc.mutations.launches import LAUNCHES as PLAIN_LAUNCHES
from tests.mslc.mutations.tiles import TILED_LAUNCHES

INCLUDE_DIRS = [HERE, ROOT, mlx_kernels.include_dir()]
SEEDS = (0, 1)
LAUNCHES = PLAIN_LAUNCHES | TILED_LAUNCHES


def original(file: str) -> Path:
    return next(directory / file for directory in INCLUDE_DIRS if (directory / file).exists())


def mutated(mutation: Mutation) -> str:
    text = original(mutation.file).read_text()
    start = text.index(mutation.after) if mutation.after else 0
    position = text.index(mutation.old, start)
    return text[:position] + mutation.new + text[position + len(mutation.old) :]


def run(launch: Launch, source: str | Path, include_dirs: list[Path]) -> None:
    options = replace(CHECKED, kernels=(launch.kernel,))
    library = Library(source, include_dirs, launch.constants, launch.defines, options)
    checks.verify(
        library, launch.kernel, launch.buffers, launch.grid, launch.threadgroup, seeds=SEEDS, step_limit=10**6
    )


@pytest.mark.parametrize("name", LAUNCHES)
def test_no_findings_without_a_bug(rng, name):
    launch = LAUNCHES[name](rng)
    run(launch, launch.source, INCLUDE_DIRS)
    assert launch.error() <= launch.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
def test_no_findings_in_any_silu_gate_kernel(rng, aligned):
    library = Library(ROOT / "metal/silu_gate/silu_gate.metal", INCLUDE_DIRS, {0: aligned}, options=CHECKED)
    rows, columns = 13, 24 if aligned else 21
    params = np.zeros(1, ELEMENTWISE_PARAMS)
    params[0]["size"], params[0]["rank"] = rows * columns, 2
    params[0]["shape"][:2] = rows, columns
    params[0]["strides"][:, :2] = columns, 1
    assert len(library.kernels) == 18
    for name in library.kernels:
        encode = ENCODE["float" if "float32" in name else "half" if "float16_" in name else "bfloat16_t"]
        count = {"forward": 3, "backward": 5, "jvp": 5}[name.split("_")[2]]
        buffers = [encode(rng.standard_normal(rows * columns)) for _ in range(count)]
        checks.verify(library, name, {**dict(enumerate(buffers)), count: params}, (3, 1, 1), (32, 1, 1), seeds=SEEDS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: re.sub(r"\W+", "-", m.name))
def test_bug_is_caught(rng, tmp_path, monkeypatch, mutation):
    monkeypatch.chdir(tmp_path)  # not the repository: quoted includes are looked for in the current directory first
    launch = LAUNCHES[mutation.launch](rng)
    overlay = tmp_path / "changed"
    changed = overlay / mutation.file
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(mutated(mutation))
    is_source = isinstance(launch.source, Path) and launch.source == original(mutation.file)
    source = changed if is_source else launch.source
    if mutation.kind == WRONG:
        run(launch, source, [overlay, *INCLUDE_DIRS])
        assert launch.error() > 10 * max(launch.tolerance, 1e-5)
        return
    with pytest.raises(SimulationError) as caught:
        run(launch, source, [overlay, *INCLUDE_DIRS])
    of_kind = [f for f in caught.value.findings if f.kind == mutation.kind]
    assert of_kind, f"only {caught.value}"
    assert all(f.kernel == launch.kernel for f in of_kind)
    if mutation.line:
        file = str(original(mutation.line_file)) if mutation.line_file else str(changed)
        lines = np.array(Path(file).read_text().split("\n"))
        named = {(f.file, f.line) for f in of_kind} | {(f.other_file, f.other_line) for f in of_kind}
        texts = [lines[line - 1] for name, line in named if Path(name) == Path(file)]
        assert any(mutation.line in text for text in texts), f"{caught.value}"


def test_the_catalogue_is_large_enough():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 15
