"""The built site: what its API pages show, how its pages are ordered, and how they look in a browser."""

import ast
import dataclasses
import inspect
import io
import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from matplotlib import image

import browser
import site_pages
from public_names import CLASSES, FUNCTIONS, NAMES, OPS, arguments, signatures

pytestmark = pytest.mark.cpu_only
ROOT = site_pages.ROOT


# ---- API pages -------------------------------------------------------------------------------------------------------


def shown(path: str) -> list[tuple[ast.arguments, str]]:
    """The signatures of an entry: parameters, and what is returned. They are Python without ``def``."""
    heading = site_pages.entries()[path].partition('<div class="doc doc-contents')[0]
    result = []
    for block in re.findall(r'class="[^"]*doc-signature[^"]*">(.*?)</pre>', heading, re.DOTALL):
        call, _, returned = site_pages.text(block).rpartition("->")
        result.append((arguments("def " + (call or returned)), returned.strip() if call else ""))
    return result


def values(kept: ast.arguments) -> dict[str, str | None]:
    """Defaults by parameter, as text; None for a parameter without one."""
    positional = [*kept.posonlyargs, *kept.args]
    defaults = [*[None] * (len(positional) - len(kept.defaults)), *kept.defaults, *kept.kw_defaults]
    return {
        argument.arg: default and ast.unparse(default)
        for argument, default in zip([*positional, *kept.kwonlyargs], defaults, strict=True)
    }


@pytest.mark.parametrize("path", sorted(OPS | FUNCTIONS))
def test_functions_show_types_and_defaults(path):
    found = shown(path)
    defined = signatures(NAMES[path])
    if path in OPS:
        assert len(found) == len(defined)
    for parsed, returned in found:
        assert returned
        every = [*parsed.posonlyargs, *parsed.args, *parsed.kwonlyargs]
        assert not [argument.arg for argument in every if argument.annotation is None]
    if path in FUNCTIONS and len(found) > len(defined):  # one for each overload
        assert all(list(values(parsed)) == list(values(defined[0])) for parsed, _ in found)
        return
    for (parsed, _), kept in zip(found, defined, strict=True):
        ours, expected = values(parsed), values(kept)
        assert list(ours) == list(expected)
        for name, default in expected.items():
            assert (ours[name] is None) == (default is None), name
            # A named constant, such as DEFAULT_STEP_LIMIT, is shown by its name.
            if default is not None and not re.fullmatch(r"[A-Z_]+", ours[name] or ""):
                assert ours[name] == default, name


@pytest.mark.parametrize("path", sorted(CLASSES))
def test_classes_show_how_they_are_made(path):
    made = NAMES[path]
    if not dataclasses.is_dataclass(made) and issubclass(made, Exception):
        return
    try:
        given = inspect.signature(made).parameters
    except ValueError:  # of the extension, and without a constructor: a function makes it
        assert shown(path) == []
        return
    ((parsed, _),) = shown(path)
    expected = [name for name in given if name not in ("args", "kwargs")]
    assert list(values(parsed)) == expected
    assert not [argument.arg for argument in (*parsed.args, *parsed.kwonlyargs) if argument.annotation is None]


@pytest.mark.parametrize("path", sorted(NAMES))
def test_entries_lead_to_the_source(path):
    repository = site_pages.repository()
    ((target, line),) = re.findall(
        rf'href="{re.escape(repository)}/blob/main/([^"#]+)#L(\d+)">Source', site_pages.entries()[path], re.DOTALL
    )[:1]
    lines = (ROOT / target).read_text().splitlines()
    name = path.rpartition(".")[2]
    nearby = "\n".join(lines[int(line) - 1 : int(line) + 3])
    assert name in nearby or "k" + name.title().replace("_", "") in nearby


def test_nothing_of_nanobind_is_left():
    raw = re.compile(r"Overloaded function|arg\d?: |object at 0x|nanobind::|mlx\.core\.array,|_ext\b")
    for path in NAMES:
        text = site_pages.text(site_pages.entries()[path])
        assert not raw.search(text), f"{path}: {raw.search(text)}"
        name = re.escape(path.rpartition(".")[2])
        if path in OPS:
            assert not re.search(rf"{name} ?\( ?\) -> ", text), path


# ---- order of the pages ----------------------------------------------------------------------------------------------


def test_users_and_authors_have_tabs_of_their_own():
    page = (site_pages.build() / "index.html").read_text()
    tabs = page.partition('<nav class="md-tabs"')[2].partition("</nav>")[0]
    names = [site_pages.text(link) for link in re.findall(r"<a .*?</a>", tabs, re.DOTALL)]
    assert names == ["Guide", "API", "Kernel authors"]


def test_every_page_is_in_the_sidebar_once():
    links = re.findall(r'<a href="([^"#]+\.html)" class="md-nav__link', (site_pages.build() / "faq.html").read_text())
    sidebar = [link for link in links if not link.startswith("..")]
    assert sorted(set(sidebar)) == sorted(sidebar)
    assert set(site_pages.pages()) <= {*sidebar, "faq.html"}
    assert sum(link.lower() == "training.html" for link in sidebar) == 1


def test_the_repository_is_linked():
    repository = site_pages.repository()
    for page in site_pages.pages():
        assert f'<a href="{repository}" title="Go to repository"' in (site_pages.build() / page).read_text(), page


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Browser]:
    path = browser.find()
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with browser.Browser(path) as opened:
        yield opened


def test_nothing_is_fetched(page):
    """The site fetches nothing from other hosts. Material would ask GitHub for the repository's stars."""
    asked = page.requested_by((site_pages.build() / "index.html").as_uri())
    assert len(asked) > 3
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


# What sticks out of the window and is not inside a box that scrolls.
OVERFLOW = """(() => {
  const scrolls = (element) => {
    for (let box = element.parentElement; box !== document.body; box = box.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true;
    return false;
  };
  const describe = (element) => `${element.tagName} ${element.className}: ${element.textContent.trim().slice(0, 60)}`;
  const found = [...document.querySelectorAll(".md-content *")].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1) && !scrolls(element);
  }).map(describe);
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.push(`the page is ${width} wide`);
  return found;
})()"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1280, "dark")])
def test_nothing_overflows(page, width, scheme):
    page.resize(width)
    page.prefer(scheme)
    wrong = {}
    for name in site_pages.pages():
        page.open((site_pages.build() / name).as_uri())
        if found := page.evaluate(OVERFLOW):
            wrong[name] = found
    assert not wrong


CUT = """[...document.querySelectorAll(".highlight:not(.language-text) pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth).map((code) => code.textContent.slice(0, 60))"""


@pytest.mark.slow
def test_code_is_not_cut_on_a_phone(page):
    """Long lines wrap. Text without a language scrolls, because drawings and tables need their lines."""
    page.resize(400)
    seen, wrong = 0, {}
    for name in site_pages.pages():
        page.open((site_pages.build() / name).as_uri())
        seen += page.evaluate('document.querySelectorAll(".language-python pre > code").length')
        if found := page.evaluate(CUT):
            wrong[name] = found
    assert seen > 100
    assert not wrong


def test_types_of_results_are_whole():
    """A result's type with parentheses would lose one of them."""
    for name, entry in site_pages.entries().items():
        for code in re.findall(r"<code>(.*?)</code>", entry.partition("Returns:")[2], re.DOTALL):
            assert code.count("(") == code.count(")"), (name, code)


def test_an_overflow_is_found(page):
    page.resize(400)
    page.open((site_pages.build() / "index.html").as_uri())
    page.evaluate("document.querySelector('.md-content h1').style.width = '600px'")
    assert any(found.startswith("H1") for found in page.evaluate(OVERFLOW))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_fit_the_scheme(page, scheme):
    """Figures are light on a light page and dark on a dark one."""
    page.resize(1280)
    page.prefer(scheme)
    count = 0
    for name in site_pages.pages():
        if "<img" not in (site_pages.build() / name).read_text().partition("<article")[2].partition("</article")[0]:
            continue
        page.open((site_pages.build() / name).as_uri())
        boxes = page.evaluate(
            "[...document.querySelectorAll('.md-content img')].map((image) => image.getBoundingClientRect().toJSON())"
        )
        for box in boxes:
            clip = {key: box[key] for key in ("x", "y", "width", "height")}
            pixels = image.imread(io.BytesIO(page.screenshot(**clip)))[..., :3]
            brightness = float(pixels.mean())
            assert (brightness > 0.75) if scheme == "light" else (brightness < 0.35), f"{name}: {brightness}"
            count += 1
    assert count >= 10


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site_pages.build()))) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


SEARCH = """new Promise((resolve) => {
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = "%s";
  const started = Date.now();
  const look = () => {
    field.dispatchEvent(new Event("keyup", { bubbles: true }));
    const found = [...document.querySelectorAll(".md-search-result__item a")].map((link) => link.href);
    if (found.length || Date.now() - started > 20000) resolve(found);
    else setTimeout(look, 200);
  };
  look();
})"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fallback", "troubleshooting.html"),
        ("softcap", "flash_attention.html"),
        ("liger", "coming-from.html"),
        ("xcode", "xcode.html"),
        ("quantized_topk", "quantized_head.html"),
    ],
)
def test_search_finds(page, server, words, expected):
    page.resize(1280)
    page.open(f"{server}/index.html")
    found = page.evaluate(SEARCH % words)
    assert any(Path(link.partition("#")[0].partition("?")[0]).name == expected for link in found[:8]), found
