"""Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs the tests against it (Linux).

Run it in an environment that has the `test` extra and the build requirements (`pip install ".[cpu,test]"
scikit-build-core nanobind==3.1.0`); arguments go to pytest, such as `--all`. A finding ends the run with its report. Of the
CPU kernels the build has those that this machine chooses, and those that any machine can run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Not about the extension's memory: the type checker, and the stub, which a sanitized module cannot be asked for.
LEFT_OUT = ["tests/documentation/test_typing.py"]


def runtime(name: str) -> str:
    """The sanitizer's runtime library, which has to be loaded before Python itself."""
    compiler = os.environ.get("CXX", "c++")
    run = subprocess.run([compiler, f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def chosen_isa() -> str:
    ask = [sys.executable, "-c", "import mlx_anvil; print(mlx_anvil.info()['isa'])"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        options = [
            f"-Cbuild-dir={folder}/build",
            "-Ccmake.define.MLX_ANVIL_SANITIZE=ON",
            f"-Ccmake.define.MLX_ANVIL_ISAS=baseline;{chosen_isa()}",
            "-Ccmake.build-type=RelWithDebInfo",
        ]
        subprocess.run([*install, "--target", f"{folder}/site", *options, str(ROOT)], check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": f"{runtime('asan')} {runtime('ubsan')}",
            # Python itself does not free everything at exit; one test needs an array of more than 4 GiB.
            # To files: pytest holds back what the process prints.
            "ASAN_OPTIONS": f"detect_leaks=0:handle_abort=1:max_allocation_size_mb=16384:log_path={folder}/report",
            "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={folder}/report",
            "PYTHONPATH": f"{folder}/site",
        }
        ignored = [f"--ignore={name}" for name in LEFT_OUT]
        check = "import mlx_anvil; print(mlx_anvil._ext.__file__)"
        loaded = subprocess.run(
            [sys.executable, "-c", check], env=environment, check=True, capture_output=True, text=True
        )
        if not loaded.stdout.strip().startswith(folder):
            raise SystemExit(f"the tests would load {loaded.stdout.strip()}, not the sanitized build")
        # pytest's own handler of crashes would take the signals from the sanitizer, which has the native stack.
        plugins = ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
        pytest = [sys.executable, "-m", "pytest", *plugins, *ignored, *sys.argv[1:]]
        status = subprocess.run(pytest, cwd=ROOT, env=environment).returncode
        for report in sorted(Path(folder).glob("report.*")):
            print(report.read_text())
            status = status or 1
        return status


if __name__ == "__main__":
    sys.exit(main())
