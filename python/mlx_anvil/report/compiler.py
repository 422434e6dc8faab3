"""Compiles every ``.metal`` file of the package with Apple's compiler, in each version of the language."""

import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_anvil import _ext
from mlx_anvil.report.section import Deadline, Outcome, Skipped

# The metallib is built for the first version. MLX may compile kernels from source for any of them.
# As in mlx_anvil.mslc, which cannot be imported without NumPy.
STANDARDS = ("metal3.1", "metal3.2", "metal4.0", "metal4.1")
_METAL = ("xcrun", "-sdk", "macosx", "metal")
_MOST_SECONDS = 180.0
_MOST_CHARACTERS = 20_000  # longer diagnostics are cut


def _compile(path: str, standard: str, folder: Path, deadline: Deadline) -> dict[str, Any]:
    row: dict[str, Any] = {"file": path, "standard": standard, "result": "not run", "diagnostics": "", "seconds": 0.0}
    if deadline.is_over:
        return row
    source = folder / path.replace("/", "_")
    source.write_text(_ext._file_source(path))
    # AIR with optimization for the first version, syntax only for the others.
    output = ["-c", "-o", f"{source}.air"] if standard == STANDARDS[0] else ["-fsyntax-only"]
    start = time.monotonic()
    try:
        command = [*_METAL, f"-std={standard}", *output, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(_MOST_SECONDS, deadline.left))
    except subprocess.TimeoutExpired:
        return row | {"result": "timeout", "seconds": time.monotonic() - start}
    text = done.stderr.replace(f"{folder}/", "")
    row["seconds"] = time.monotonic() - start
    row["diagnostics"] = text[:_MOST_CHARACTERS]
    row["errors"] = len(re.findall(r"\berror:", text))
    row["warnings"] = len(re.findall(r"\bwarning:", text))
    if done.returncode == 0:
        row["result"] = "ok"
    else:
        is_unknown = "invalid value" in text and standard in text
        row["result"] = "unknown version" if is_unknown else "error"
    return row


def run(deadline: Deadline) -> Outcome:
    """A finding is a file that the compiler rejects. A language version that it does not know is not a finding."""
    if not shutil.which("xcrun"):
        raise Skipped("no xcrun found: Apple's Metal compiler runs on macOS only")
    version = subprocess.run([*_METAL, "--version"], capture_output=True, text=True, timeout=60)
    if version.returncode:
        first = (version.stderr.strip() or "no message").splitlines()[0]
        raise Skipped(f"xcrun -sdk macosx metal does not work: {first}")
    files = _ext._metal_file_names()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # All files in the first version come first: they matter most if the time limit is reached.
        todo = [(path, standard) for standard in STANDARDS for path in files]
        rows = list(pool.map(lambda job: _compile(job[0], job[1], Path(folder), deadline), todo))
    count = {
        result: sum(row["result"] == result for row in rows) for result in dict.fromkeys(r["result"] for r in rows)
    }
    summary = f"{len(files)} files in {len(STANDARDS)} versions: " + ", ".join(
        f"{n} {what}" for what, n in count.items()
    )
    return Outcome(summary, count.get("error", 0), {"compiler": version.stdout.strip().splitlines()[:1], "rows": rows})
