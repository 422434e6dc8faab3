"""Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs the tests against it (Linux).

Run it in an environment with the `test` extra and the build requirements (`pip install ".[cpu,test]" scikit-build-core
nanobind==3.1.0`). It passes its arguments, such as `--all`, to pytest. A finding ends the run with a report. The build
contains the CPU kernels of every instruction set that this machine has; --kernels takes what MLX_ANVIL_ISAS takes.

  python tools/sanitize.py --build FOLDER              only builds, into FOLDER
  python tools/sanitize.py --built FOLDER [ARGUMENTS]  runs the tests against that build
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Type checks do not touch the extension's memory, and a sanitized build cannot generate the stub that they need.
LEFT_OUT = ["tests/documentation/test_typing.py"]


def runtime(name: str) -> str:
    """Returns the sanitizer's runtime library, which must be loaded before Python."""
    compiler = os.environ.get("CXX", "c++")
    run = subprocess.run([compiler, f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def build(folder: Path, kernels: str) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    options = [
        f"-Cbuild-dir={folder}/build",
        "-Ccmake.define.MLX_ANVIL_SANITIZE=ON",
        f"-Ccmake.define.MLX_ANVIL_ISAS={kernels}",
        "-Ccmake.build-type=RelWithDebInfo",
    ]
    subprocess.run([*install, "--upgrade", "--target", f"{folder}/site", *options, str(ROOT)], check=True)


def test(folder: Path, arguments: list[str]) -> int:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('asan')} {runtime('ubsan')}",
        # Python does not free all memory at exit, and one test needs an array of more than 4 GiB. The reports go to
        # files because pytest captures the output.
        "ASAN_OPTIONS": f"detect_leaks=0:handle_abort=1:max_allocation_size_mb=16384:log_path={folder}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={folder}/report",
        "PYTHONPATH": f"{folder}/site",
    }
    ignored = [f"--ignore={name}" for name in LEFT_OUT]
    check = "import mlx_anvil; print(mlx_anvil._ext.__file__)"
    loaded = subprocess.run([sys.executable, "-c", check], env=environment, check=True, capture_output=True, text=True)
    if not loaded.stdout.strip().startswith(str(folder)):
        raise SystemExit(f"the tests would load {loaded.stdout.strip()}, not the sanitized build")
    # pytest's crash handler would hide the signals from the sanitizer, which prints the native stack.
    plugins = ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
    pytest = [sys.executable, "-m", "pytest", *plugins, *ignored, *arguments]
    for report in folder.glob("report.*"):  # of the run before
        report.unlink()
    status = subprocess.run(pytest, cwd=ROOT, env=environment).returncode
    for report in sorted(folder.glob("report.*")):
        print(report.read_text())
        status = status or 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--built", type=Path)
    parser.add_argument("--kernels", default="runnable")
    options, arguments = parser.parse_known_args()
    if options.build:
        build(options.build.absolute(), options.kernels)
        return 0
    if options.built:
        return test(options.built.absolute(), arguments)
    with tempfile.TemporaryDirectory() as name:
        build(Path(name), options.kernels)
        return test(Path(name), arguments)


if __name__ == "__main__":
    sys.exit(main())
