"""Builds the site: `python tools/pages.py [FOLDER]`; into build/site, pages and then html.

Pages are those of docs/ and the READMEs of rooms. They are written for a checkout, where their links
lead to files. Here they get names of the site's own: a page of docs/ has its name there, README.md is
index.md, every other file has its path. What a link names that is no page and no picture, a source
file or a folder, is named and not linked. zensical makes HTML of them, and warns of every link that
leads nowhere: then nothing is built.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ABOVE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
ROOMS = ("docs", "policies", "runtime", "server", "proto", "tools")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def sources() -> dict[Path, str]:
    """Pages and pictures of the checkout, with their names on the site."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "*.md",
            "*.png",
            "*.svg",
            "*.css",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    named = {}
    for name in listed:
        if name in ABOVE or name.split("/")[0] in ROOMS:
            named[ROOT / name] = "index.md" if name == "README.md" else name.removeprefix("docs/")
    return {path: name for path, name in named.items() if path.exists()}


def rewritten(path: Path, names: dict[Path, str]) -> str:
    """A page, its links as they are on the site. Code stays as it is."""
    here = Path(names[path]).parent

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        name, _, anchor = target.partition("#")
        there = names.get(Path(os.path.normpath(path.parent / name)))
        if there is None:
            return text
        return f"{picture}[{text}]({os.path.relpath(there, here)}{anchor and '#' + anchor})"

    fenced = re.split(r"(^```.*?^```$)", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(fenced))


def build(folder: Path) -> Path:
    """Makes `folder`/html, and returns it. Raises CalledProcessError where zensical finds a fault."""
    shutil.rmtree(folder, ignore_errors=True)
    names = sources()
    for path, name in names.items():
        page = folder / "pages" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            page.write_text(rewritten(path, names))
        else:
            shutil.copyfile(path, page)
    config = shutil.copy(ROOT / "docs" / "zensical.toml", folder)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict", "-f", config], check=True)
    return folder / "html"


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site")
