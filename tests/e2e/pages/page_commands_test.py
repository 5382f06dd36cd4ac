"""Commands and flags that pages show are those that there are: also in blocks that are not run, and in
sentences."""

import functools
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from epikv.cli import main
from epikv.testing import find_binary
from page_blocks import ROOT, SHELL, blocks, pages

# Paths of the checkout.
PATH = re.compile(r"(?<![\w./-])(?:cmake|deploy|docs|policies|proto|tests|tools)/[\w./*-]*\w")
MADE = (
    "tests/wire/node_modules/",
    "deploy/kubernetes/overlays/mine",
    "policies/geometry/every_nth.cc",
    "proto/released/VERSION.binpb",
)
# Folders that programs lie in; "": PATH's.
PLACES = ("", "bin", "server")


def called(text: str) -> list[list[str]]:
    """The words of each call of epikv or epikvd in a piece of shell."""
    calls, pending = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        words = shlex.shlex(pending, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        try:
            split = list(words)
        except ValueError:  # a quote that goes on in the next line
            continue
        pending = ""
        call = None
        for word in split:
            # Not a folder of that name, as /var/lib/epikv.
            if Path(word).name in ("epikv", "epikvd") and Path(word).parent.name in PLACES:
                call = [Path(word).name]
                calls.append(call)
            elif set(word) <= set("();<>|&"):
                call = None
            elif call is not None:
                call.append(word)
    return calls


@functools.cache
def settings() -> set[str]:
    """Of epikvd."""
    told = subprocess.run([find_binary(), "--help"], check=True, capture_output=True, text=True)
    return {"--help", *re.findall(r"^ +(--\w+)", told.stdout, re.MULTILINE)}


def unknown(words: list[str], command: click.Command | None = None) -> list[str]:
    """The flags and commands among its words that there are not."""
    name, *words = words
    if command is None and name == "epikvd":
        flags = (word.partition("=")[0] for word in words if word.startswith("--"))
        return [flag for flag in flags if flag not in settings()]
    command = command or main
    options = {
        flag: option
        for option in command.params
        if isinstance(option, click.Option)
        for flag in [*option.opts, *option.secondary_opts]
    }
    found = []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if word == "--":  # of the daemon that it starts
            return found + unknown(["epikvd", *words])
        if re.match(r"--?[A-Za-z]", word):
            option = options.get(flag)
            if option is None and flag not in ("-h", "--help"):
                found.append(word)
            elif option and not (equals or option.is_flag) and words:
                words.pop(0)
        elif isinstance(command, click.Group):
            if word.isupper() or word == "...":  # whichever
                return found
            inner = command.get_command(click.Context(command), word)
            return found + ([word] if inner is None else unknown([word, *words], inner))
        elif not command.context_settings.get("allow_interspersed_args", True):
            # Of serve: what follows the model, but for --http.
            return found + [each for each in unknown(["epikvd", *words]) if each != "--http"]
    return found


def outside(text: str) -> list[str]:
    """Commands in sentences."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`(epikvd? [^`]*)`", text)


# What a release had may be gone.
PRESENT = [page for page in pages() if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_are_those_that_there_are(page: Path) -> None:
    shown = [block.text for block in blocks(page) if block.language in SHELL]
    for text in [*shown, *outside(page.read_text())]:
        for call in called(text):
            assert unknown(call) == [], " ".join(call)
        for path in PATH.findall(text):
            assert path.startswith(MADE) or list(ROOT.glob(path)), path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epikv generate --budget 50% -n 3 'a\n--b' # --c", []),
        ("epikv plans && epikv bench plans; epikv bench NAME", ["plans", "plans"]),
        ("for q in a; do x=$(epikv eval --tusk a --out b); done", ["--tusk"]),
        ("epikv eval --daemon-flag --nonsense=1 --out b --slack=own --problem 3", ["--problem"]),
        ("epikv serve --dtype bf16 model.pt --threads=1 --thread=2", ["--thread"]),
        ("epikv bench load -- --threads=1 --thread=2", ["--thread"]),
        ("build/dev/server/epikvd --model=a \\\n --modl=b &", ["--modl"]),
    ],
)
def test_a_flag_that_there_is_not_is_found(text: str, expected: list[str]) -> None:
    assert [word for call in called(text) for word in unknown(call)] == expected
