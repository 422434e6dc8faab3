"""What the names of Apple's GPUs say, the chips that the simulator stands in for, and their choices."""

import json
from pathlib import Path

import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil._simulate import _chips

pytestmark = pytest.mark.cpu_only

UNKNOWN, PHONE, BASE, PRO, MAX, ULTRA = range(6)


@pytest.mark.parametrize(
    ("architecture", "name", "generation", "size", "cores", "neural"),
    [
        ("applegpu_g13g", "Apple M1", 13, BASE, 8, False),
        ("applegpu_g13s", "Apple M1 Pro", 13, PRO, 16, False),
        ("applegpu_g14d", "Apple M2 Ultra", 14, ULTRA, 76, False),
        ("applegpu_g15s", "Apple M3 Max", 15, MAX, 40, False),
        ("applegpu_g16s", "Apple M4 Pro", 16, PRO, 20, False),
        ("applegpu_g16g", "Apple M5", 16, BASE, 10, False),  # as MLX_METAL_GPU_ARCH can say
        ("applegpu_g17g", "Apple M5", 17, BASE, 10, True),
        ("applegpu_g17s", "Apple M5 Max", 17, MAX, 40, True),
        ("applegpu_g17p", "Apple A19 Pro", 17, PHONE, 0, False),
        ("applegpu_g18p", "Apple A20 Pro", 18, PHONE, 0, True),
        ("applegpu_g18s", "a new one", 18, MAX, 40, True),
        ("applegpu_g13x", "a new one", 13, UNKNOWN, 0, False),
        ("applegpu_gXXg", "Apple Paravirtual device", 0, BASE, 0, False),
        ("", "", 0, UNKNOWN, 0, False),
    ],
)
def test_names(architecture, name, generation, size, cores, neural):
    assert _ext._apple_gpu(architecture, name) == (generation, size, cores, neural)


def test_cores_are_those_of_the_largest_published_variant():
    chips = json.loads((Path(mlx_anvil.__file__).parent / "mslc" / "chips.json").read_text())["chips"]
    letters = {"": "g", "Pro": "s", "Max": "s", "Ultra": "d"}
    for chip, numbers in chips.items():
        number, _, size = chip.removeprefix("M").partition(" ")
        architecture = f"applegpu_g{12 + int(number)}{letters[size]}"
        assert _ext._apple_gpu(architecture, f"Apple {chip}")[2] == max(numbers["cores"]["value"]), chip


@pytest.mark.parametrize("chip", _chips())
def test_chips_of_the_simulator(chip):
    with mlx_anvil.simulate(chip=chip):
        assert _ext._choices_key("cpu") == f"simulator: {chip}"
        choices = _ext._choices("cpu")
    routes = (choices["flash_attention.mlx_queries"], choices["quantized_matmul.mlx_rows"])
    assert routes == ((9, 9) if chip.startswith("M5") else (0, 0))
    assert choices["quantized_matmul.mlx_few_rows"] == (4 if chip[1] > "2" else 0)


def test_other_simulators():
    with mlx_anvil.simulate():
        assert _ext._choices_key("cpu") == "simulator"
        apple = _ext._choices("cpu")
    with mlx_anvil.simulate(matrix_units=True):
        assert _ext._choices_key("cpu") == "simulator: matrix units"
        nvidia = _ext._choices("cpu")
    assert (apple["norm.elements_per_thread"], nvidia["norm.elements_per_thread"]) == (8, 16)


@pytest.mark.parametrize("chip", ["M0", "m4", "M4 max", "M1  Max", "A17 Pro", ""])
def test_unknown_chips(chip):
    with pytest.raises(ValueError, match=r"^\[simulate\] chip is .*; allowed: M1, M1 Pro, .*M5 Max\."):
        mlx_anvil.simulate(chip=chip)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"^\[simulate\] chip is a int; allowed: None, or a str"):
        mlx_anvil.simulate(chip=4)
    with pytest.raises(ValueError, match=r"^\[simulate\] chip and matrix_units are both given; allowed: at most one"):
        mlx_anvil.simulate(chip="M1", matrix_units=True)
