"""The site of the documents: it is built without a warning, and a browser shows it on a phone, too."""

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import Chromium, chromium

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "tools" / "pages.py"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    subprocess.run([sys.executable, PAGES, folder], check=True)
    return folder / "html"


def test_each_page_has_its_place(html: Path) -> None:
    navigation = (ROOT / "docs" / "zensical.toml").read_text()
    named = set(re.findall(r'"([\w./-]+\.md)"', navigation))
    assert named >= {page.name for page in (ROOT / "docs").glob("*.md")}
    for name in named:
        page = Path(name).with_suffix("")
        folder = page.parent if page.name in ("README", "index") else page
        assert (html / folder / "index.html").exists(), name


def test_what_pages_say_to_tests_does_not_show(html: Path) -> None:
    """Comments above blocks of commands; and the fences behind them are taken as fences."""
    hidden = 0
    for page in html.rglob("*.html"):
        text = page.read_text()
        hidden += len(re.findall("<!-- (?:not run:|run by)", text))
        shown = re.sub("<!--.*?-->|<(code|script)\\b.*?</\\1>", "", text, flags=re.DOTALL)
        assert not re.search("run by tests/|not run:|```|&lt;!--", shown), page
    assert hidden >= 5


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("docs", "tools/pages.py", "README.md"):
        target = checkout / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    (checkout / "docs" / "errors.md").write_text("# Errors\n\n[gone](#nowhere)\n")
    subprocess.run(["git", "init", "-q", checkout], check=True)
    command = [sys.executable, checkout / "tools" / "pages.py", tmp_path / "site"]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode != 0 and "nowhere" in built.stdout + built.stderr


@pytest.fixture(scope="module")
def address(html: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    serve = functools.partial(Quiet, directory=str(html))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_the_window(
    html: Path, address: str, browser: Chromium, width: int
) -> None:
    """Tables and code scroll by themselves."""
    for page in sorted(html.rglob("index.html")):
        name = page.parent.relative_to(html).as_posix()
        browser.open(f"{address}/{name}/".replace("/./", "/"), width=width)
        assert all(url.startswith((address, "data:", "blob:")) for url in browser.addresses()), name
        assert browser.evaluate("document.querySelector('h1').innerText.trim().length") > 0, name
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
        assert browser.evaluate(
            "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        ), name
