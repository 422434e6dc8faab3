"""The README as PyPI shows it: links and pictures work outside the repository."""

import copy
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from hatch_fancy_pypi_readme._builder import build_text  # which scikit-build-core calls, too
from hatch_fancy_pypi_readme._config import load_and_validate_config
from readme_renderer import markdown

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]
HOOK = CONFIGURATION["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
OWN_ANCHOR = "#user-content-"  # that the renderer adds to a heading


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> str:
    """The description as HTML."""
    monkeypatch.chdir(ROOT)
    config = load_and_validate_config(copy.deepcopy(HOOK))  # it takes entries out
    text = build_text(config.fragments, config.substitutions, PROJECT["name"], PROJECT["version"])
    rendered = markdown.render(text)
    assert rendered
    return rendered


def test_no_link_is_relative(page: str):
    targets = [target for target in re.findall(r'(?:href|src)="([^"]*)"', page) if not target.startswith(OWN_ANCHOR)]
    assert len(targets) > 40
    assert [target for target in targets if not target.startswith("https://")] == []


def test_links_lead_to_files_of_the_release(page: str):
    repository, version = PROJECT["urls"]["Repository"], PROJECT["version"]
    files = f"{repository}/blob/v{version}/"
    raw = f"{repository.replace('github.com', 'raw.githubusercontent.com')}/v{version}/"
    links = {link for link in re.findall(r'href="([^"#]*)', page) if link.startswith(f"{repository}/")}
    pictures = set(re.findall(r'src="([^"]*)"', page))
    assert len(links) > 30
    assert pictures
    for targets, start in ((links, files), (pictures, raw)):
        for target in targets:
            assert target.startswith(start)
            assert (ROOT / target.removeprefix(start)).exists(), target


def test_tables_and_code_are_rendered(page: str):
    readme = (ROOT / "README.md").read_text()
    assert page.count("<table>") == len(re.findall(r"^\|-", readme, re.M))
    assert page.count("<pre") == readme.count("```") // 2
    assert "<!--" not in page
