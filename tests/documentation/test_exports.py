"""The lists of ops that the package exports are those of ``python tools/exports.py``."""

import pytest

import exports

pytestmark = pytest.mark.cpu_only

FILES = {path.parent.name: (path, text) for path, text in exports.exports()}


@pytest.mark.parametrize("package", FILES)
def test_exports_are_up_to_date(package: str):
    path, text = FILES[package]
    assert path.read_text() == text, "run python tools/exports.py"


@pytest.mark.parametrize("package", FILES)
def test_a_new_op_is_added_and_an_old_one_removed(package: str):
    _, text = FILES[package]
    block = exports.OF_REFERENCE if package == "reference" else exports.OF_EXTENSION
    changed = exports.rewritten(text, block, "from mlx_anvil.reference.a import (\n    new_op,\n)\n", ["new_op"])
    assert '    "new_op",\n' in changed
    assert '"rope"' not in changed
    kept = '"OpSpec"' if package == "reference" else '"trace"'
    assert kept in changed
    if package == "reference":  # and back
        (imports,) = block.findall(text)
        names = [name for of_module in exports.definitions().values() for name in of_module]
        assert exports.rewritten(changed, block, imports, names) == text


def test_every_op_is_exported():
    assert set(exports.ops()) >= {"flash_attention", "rope_qk", "quantized_gemv"}
    assert exports.definitions()["rope"] == ["rope", "rope_and_cache"]
