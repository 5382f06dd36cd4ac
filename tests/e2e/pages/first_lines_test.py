"""The first lines that a new user pastes, from README.md and docs/getting-started.md: each does something
to look at, on the sample model that the quickstart leaves. Other than there are ports.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.recommended import RECOMMENDED
from epikv.sample.problem import parse_answers
from epikv.testing import find_binary
from shell import Shell, free_ports

ROOT = Path(__file__).parents[3]

PAGES = {"README.md": "## Use it\n", "docs/getting-started.md": "## The command line\n"}
MODEL = "build/sample/model.pt"
# What the sample model says to what is no problem: nobody's first impression.
NONSENSE = re.compile(r"(#\d+ )\1\1")
WHERE = (
    "EPIKV_SERVER=127.0.0.1:{listen} EPIKV_ADMIN_SERVER=127.0.0.1:{admin_listen} EPIKVD={binary}"
)
PORTS = " ".join(f"--{n}=127.0.0.1:{{{n}}}" for n in ("listen", "admin_listen", "metrics_listen"))
PROGRAMS = {
    ".venv/bin/epikv": f"""\
[ "$1" = serve ] && set -- "$@" {PORTS} --threads=1
export {WHERE}
exec {{python}} -c 'from epikv.cli import main; main()' "$@"
""",
    ".venv/bin/python": f'export {WHERE}\nexec {{python}} "$@"\n',
    "build/dev/server/epikv-probe": 'exec {probe} "$@" --listen=127.0.0.1:{listen}\n',
}


def blocks(page: str) -> list[str]:
    """What is between fences, from the page's first section for users on."""
    _, _, rest = (ROOT / page).read_text().partition(PAGES[page])
    return rest.split("```")[1::2]


def commands(page: str) -> list[str]:
    return blocks(page)[0].strip().splitlines()


def programs(page: str) -> list[str]:
    """Those in Python that run as they stand."""
    found = [block.removeprefix("python") for block in blocks(page) if block.startswith("python")]
    return [text for text in found if "async" not in text]


@pytest.fixture
def ports() -> dict[str, str]:
    return free_ports("listen", "admin_listen", "metrics_listen")


@pytest.fixture
def shell(sample_model: Path, tmp_path: Path, ports: dict[str, str]) -> Iterator[Shell]:
    """In what looks like a checkout in which the quickstart has run."""
    assert MODEL in (ROOT / "deploy" / "quickstart.sh").read_text()
    (tmp_path / MODEL).parent.mkdir(parents=True)
    shutil.copy(sample_model, tmp_path / MODEL)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    binary = find_binary()
    for name, script in PROGRAMS.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        probe = binary.with_name("epikv-probe")
        text = script.format(binary=binary, probe=probe, python=sys.executable, **ports)
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
    started = Shell(tmp_path)
    try:
        yield started
    finally:
        started.kill()


@pytest.mark.parametrize("page", PAGES)
def test_pasting_the_first_lines_shows_what_they_promise(
    page: str, shell: Shell, ports: dict[str, str], tmp_path: Path
) -> None:
    pasted = commands(page)
    assert any(MODEL in line for line in pasted)
    told = {line: shell.ok(line) for line in pasted}
    for line, out in told.items():
        assert not NONSENSE.search(out), line

    def of(begin: str) -> str:
        (out,) = (out for line, out in told.items() if line.startswith(begin))
        return out

    assert "(right)" in of("epikv demo") and "under sliding" in of("epikv demo")
    assert all(f" {name} " in of("epikv policies") for name in RECOMMENDED)
    assert parse_answers(of("epikv generate -n")), "it comes to its end"
    assert of("problem=") == ""
    for number, program in enumerate(programs(page)):
        (tmp_path / f"{number}.py").write_text(program.replace("50051", ports["listen"]))
        text = shell.ok(f"python {number}.py")
        assert parse_answers(text) == {"$l": 1, "$y": 8, "$p": 1}, text
    if page == "README.md":
        assert "h2o" in of("epikv eval") and (tmp_path / "build/programs/report.html").exists()
        return
    assert of("epikv generate --choice").strip() in ("#0 $b", "#1 $g")
    assert "perplexity 1.0" in of("epikv score")
    assert "sample" in of("epikv models") and ": serving" in of("epikv admin status")
    assert "the same text" in of("python tools/examples/compare.py")


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md", "docs/operating.md"])
def test_no_prompt_is_three_dots(page: str) -> None:
    """Which the sample model answers with nonsense."""
    shown = (ROOT / page).read_text()
    assert not re.search(r"""epikv (generate|chat|score) .*["']\.\.\.["']""", shown)
    assert 'generate("..."' not in shown


def test_the_quickstart_leaves_the_model_under_its_steady_name() -> None:
    script = (ROOT / "deploy" / "quickstart.sh").read_text()
    assert re.search(rf'ln -sf .* "\$EPIKV_ROOT/{MODEL}"', script)
