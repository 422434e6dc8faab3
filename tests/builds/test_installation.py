"""Install hints: pip accepts each of them, however the package was installed, and missing packages name an extra."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mlx_anvil import _extras
from mlx_anvil.mslc import install_command, installation, reinstall_command, requirement

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[2]
EXTRAS = set(installation.distribution("mlx-anvil").metadata.get_all("Provides-Extra"))
HINT = re.compile(r"""(?:install_command|_hint|_install)\(['"](\w+)['"]\)""")


class Installed:
    """Stands for the metadata of another installation."""

    def __init__(self, record: dict | None) -> None:
        self.record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps(self.record) if self.record else None


def install_as(monkeypatch: pytest.MonkeyPatch, record: dict | None) -> None:
    monkeypatch.setattr(installation, "distribution", lambda name: Installed(record))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "mlx-anvil"\nversion = "1"\n')
    return folder


def test_from_a_package_index(monkeypatch):
    install_as(monkeypatch, None)
    assert install_command("sim") == 'pip install "mlx-anvil[sim]"'
    assert reinstall_command() == "pip install --force-reinstall --no-cache-dir mlx-anvil"


def test_without_metadata(monkeypatch):
    def missing(name):
        raise installation.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert install_command("sim") == 'pip install "mlx-anvil[sim]"'


@pytest.mark.parametrize(("editable", "option"), [(False, ""), (True, "-e ")])
def test_from_a_checkout(monkeypatch, checkout, editable, option):
    install_as(monkeypatch, {"url": checkout.as_uri(), "dir_info": {"editable": editable}})
    assert install_command("sim") == f'pip install {option}"{checkout}[sim]"'
    monkeypatch.chdir(checkout)
    assert install_command("sim") == f'pip install {option}".[sim]"'
    assert reinstall_command() == f"pip install --force-reinstall --no-cache-dir {option}."
    assert requirement() == "."


def test_from_a_checkout_that_is_gone(monkeypatch, checkout):
    install_as(monkeypatch, {"url": checkout.as_uri(), "dir_info": {}})
    (checkout / "pyproject.toml").unlink()
    assert install_command("sim") == 'pip install "mlx-anvil[sim]"'


def test_from_a_wheel_in_a_folder(monkeypatch, tmp_path):
    wheel = tmp_path / "mlx_anvil-0.1.0-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    install_as(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("lm") == f'pip install "{wheel}[lm]"'


def test_from_version_control(monkeypatch):
    record = {"url": "https://host/mlx-anvil.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    install_as(monkeypatch, record)
    assert install_command("lm") == 'pip install "mlx-anvil[lm] @ git+https://host/mlx-anvil.git@abc"'
    assert Requirement(requirement("lm")).extras == {"lm"}


def test_a_folder_whose_name_a_shell_would_read(monkeypatch, tmp_path):
    folder = tmp_path / "a$HOME `b`"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    install_as(monkeypatch, {"url": folder.as_uri(), "dir_info": {}})
    assert shlex.split(install_command("sim")) == ["pip", "install", f"{folder}[sim]"]


def test_every_hint_names_an_extra():
    found = {match for path in (ROOT / "python").rglob("*.py") for match in HINT.findall(path.read_text())}
    found |= {extra for extra in _extras._EXTRAS.values() if extra}
    assert found >= {"bench", "cpu", "cuda13", "lm", "plot", "ptx", "sim"}
    assert found <= EXTRAS


def test_no_file_writes_its_own_hint():
    """All hints come from one function. Others would not fit the installation."""
    for path in (ROOT / "python").rglob("*.py"):
        if path.relative_to(ROOT / "python").as_posix() != "mlx_anvil/mslc/installation.py":
            assert 'pip install "mlx-anvil' not in path.read_text(), path


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_pip_takes_every_hint(extra):
    """Each hint names this checkout or this project, and the extra."""
    for command in (install_command(extra), reinstall_command()):
        program, *words = shlex.split(command)
        assert (program, words[0]) == ("pip", "install")
        target = words[-1]
        path, brackets, rest = target.partition("[")
        if brackets:
            assert rest == f"{extra}]"
        if Path(path).exists():
            assert "mlx-anvil" in (Path(path) / "pyproject.toml").read_text()
        else:
            assert Requirement(target).name == "mlx-anvil"


def test_pip_resolves_a_hint(monkeypatch, checkout):
    """pip finds the extra of a checkout by the path with brackets. The checkout's build needs nothing."""
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "mlx-anvil"\nversion = "1"\n[project.optional-dependencies]\nsim = []\n'
    )
    (checkout / "backend.py").write_text(
        "import pathlib\n"
        "def prepare_metadata_for_build_wheel(folder, config_settings=None):\n"
        '    info = pathlib.Path(folder, "mlx_anvil-1.dist-info")\n'
        "    info.mkdir()\n"
        '    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: mlx-anvil\\nVersion: 1\\nProvides-Extra: sim\\n")\n'
        '    (info / "WHEEL").write_text("Wheel-Version: 1.0\\n")\n'
        "    return info.name\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None): raise NotImplementedError\n"
    )
    install_as(monkeypatch, {"url": checkout.as_uri(), "dir_info": {}})
    words = shlex.split(install_command("sim"))[1:]
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
    run = subprocess.run([sys.executable, "-m", "pip", *words, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Would install mlx-anvil-1" in run.stdout
    assert "does not provide the extra" not in run.stderr


# ---- missing packages ------------------------------------------------------------------------------------------------


def without(modules: str, code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs code in which these modules cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules.split()!r}))\n"
    environment = {**os.environ, "MLX_ANVIL_TEST_SEED": "1"}
    command = [sys.executable, "-c", hide + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def script(path: str, *arguments: str) -> str:
    folder = str((ROOT / path).parent)
    return (
        f"import runpy; sys.path.insert(0, {folder!r}); sys.argv = [{path!r}, *{list(arguments)!r}]\n"
        f"runpy.run_path({str(ROOT / path)!r}, run_name='__main__')"
    )


COMMAND = "import runpy; sys.argv = ['mlx_anvil', *{!r}]; runpy.run_module('mlx_anvil', run_name='__main__')"
MSLC = "import runpy; sys.argv = ['mslc', 'check', 'x']; runpy.run_module('mlx_anvil.mslc', run_name='__main__')"


@pytest.mark.parametrize(
    ("modules", "code", "extra"),
    [
        ("numpy", script("examples/train.py"), "lm,plot"),
        ("matplotlib", script("examples/train.py"), "lm,plot"),
        ("matplotlib", script("examples/long_context.py"), "lm,plot"),
        ("mlx_lm", script("examples/generate.py"), "lm,plot"),
        ("numpy", script("bench/silu_gate.py"), "bench"),
        ("matplotlib", script("bench/plot.py"), "bench"),
        ("matplotlib", script("bench/training.py"), "bench"),
        ("mlx_lm", script("bench/profile_lm.py"), "bench"),
        ("gguf", script("bench/gguf_matmul.py"), "bench"),
        ("numpy", script("bench/mslc/simulator.py"), "test"),
        ("pytest", script("bench/mslc/simulator.py"), "test"),
        ("matplotlib", script("docs/figures.py"), "plot"),
        ("mlx_lm", script("docs/patch_matrix.py"), "lm"),
        ("numpy", script("docs/patch_matrix.py"), "lm"),
        ("nbclient", script("tests/run_notebooks.py"), "test"),
        ("mlx_lm", COMMAND.format(["lm", "generate"]), "lm"),
        ("mlx_lm", COMMAND.format(["bench", "model"]), "lm"),
        ("matplotlib", COMMAND.format(["bench", "op", "--plot", "x.png"]), "plot"),
        ("numpy", MSLC, "sim"),
    ],
)
def test_one_line_names_the_extra(tmp_path, modules, code, extra):
    run = without(modules, code, tmp_path)
    assert run.returncode == 1, run.stdout
    lines = [line for line in run.stderr.splitlines() if "PyTorch" not in line]
    assert len(lines) == 1, run.stderr
    assert re.search(rf"needs .*: pip install .*\[{extra}\]\"$", lines[0])


@pytest.mark.parametrize(
    ("modules", "code", "extra"),
    [
        ("mlx_lm", "import mlx_anvil; mlx_anvil.lm.patch_all()", "lm"),
        ("numpy", "from mlx_anvil.mslc import Library", "sim"),
        ("numpy", "import mlx_anvil\nwith mlx_anvil.simulate(): pass", "sim"),
    ],
)
def test_the_last_line_names_the_extra(tmp_path, modules, code, extra):
    run = without(modules, code, tmp_path)
    assert run.returncode == 1
    assert re.search(rf"needs .*: pip install .*\[{extra}\]\"$", run.stderr.splitlines()[-1])


def test_another_missing_module_keeps_its_traceback():
    code = "from mlx_anvil._extras import explain_missing_modules as explain\nexplain()\nimport nonexistent"
    run = without("", code)
    assert run.returncode == 1
    assert "Traceback" in run.stderr
    assert run.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'nonexistent'"


def test_macos_checks_without_lief():
    run = without("lief", script("tools/macos/build.py", "--check"))
    assert run.returncode == 1
    assert run.stderr == "Error: the macOS checks need LIEF: pip install lief\n"


def test_pytest_without_the_test_extra():
    code = "import pytest; sys.exit(pytest.main(['-q', '--collect-only', 'tests/builds/test_layers.py']))"
    run = without("matplotlib", code)
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line == f"Error: the tests need matplotlib: {install_command('test')}"


def test_pytorch_is_optional_in_benchmarks():
    code = f"sys.path.insert(0, {str(ROOT / 'bench')!r})\nimport harness\n" + "print(harness.installed_torch())\n" * 2
    run = without("torch", code)
    assert run.stdout == "None\nNone\n"
    assert run.stderr == "a comparison with PyTorch needs torch: pip install torch\n"
