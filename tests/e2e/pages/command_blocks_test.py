"""The command blocks of every page run, or say why not.

A block is what stands between fences: of shell (```, bash, sh, console) or of Python. It is run here,
in a folder that looks like a checkout with a model, beside a daemon, and must end with status 0; or a
comment directly above it says

    <!-- run by tests/e2e/pages/operating_test.py -->    which then names the page
    <!-- not run: it needs a GPU -->                     the reason

Whoever runs tests may be root, and a new block is run before anyone has looked at it. So it finds no
programs but epikv's, python and a few that are harmless, and is refused where it leaves its folder.

In a console block lines with `$ ` are commands, and the others are what they print, in this order;
there any number stands for any other, and `...` for anything. What is not a command is ```text.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from epikv.cli.eval_models import SHIPPED, STEERING, artefacts
from epikv.sample import problem
from epikv.testing import Daemon, Gateway, find_binary
from page_blocks import PYTHON, ROOT, SHELL, Block, blocks, commands, pages, printed
from shell import ENVIRONMENT, free_ports

BASH = shutil.which("bash") or "bash"
GENEROUS_SECONDS = 300
AT_ONCE = 2
MOST_NOT_RUN = 16
PORTS = {"listen": "50051", "admin_listen": "50052", "metrics_listen": "9464", "http": "8000"}
NO_COMMANDS = ("cpp", "diff", "json", "mermaid", "proto", "text", "textproto", "toml", "yaml")
NOTE = re.compile(r" *<!-- (?:run by (?P<test>\S+)|not run: (?P<reason>\S.*)) -->")
ADVICE = """\
Mend the block or the program. Give Sandbox a file and PROGRAMS a harmless program that it lacks, SMALLER
what takes long. Or write in the line above the block: <!-- run by tests/FILE_test.py --> or
<!-- not run: REASON -->"""
# On PATH, besides epikv's and python: none that removes, installs or changes what is not in the folder.
PROGRAMS = ("cat", "cp", "grep", "head", "mkdir", "node", "sleep", "sort", "tail")
# What epikv itself starts a daemon with; blocks do not find them.
TETHERS = ("env", "setpriv", "sh")
# What leaves the folder: absolute paths, what is above it, someone's home, what installs or writes into
# the checkout that is tested.
LEAVES = re.compile(
    r"(?<![\w.}:/-])/(?!dev/)\w[\w./-]*|(?<![\w.])\.\.(?![\w.])|(?<![\w/])~|\$\{?HOME\b"
    r"|-m (?:ensurepip|pip|venv)\b|--write\b"
)
# Of a block that starts a daemon of its own; others ask one that is there.
STARTS_A_DAEMON = re.compile(r"^\s*(epikvd\b|epikv serve\b)", re.MULTILINE)

# What takes minutes as it is shown, and how it is run here.
SMALLER = {
    r"--problems \d+": "--problems 1",
    r"--policy all": "--policy h2o --problems 1",
    r"--max-output-tokens (8192|16384)": "--max-output-tokens 64",
    r"needle@\d{4,}": "needle@100",
    r"recall@200": "recall@10",
    r"for d in model int8": "for d in int8",
    r'for q in "" "--quantize int8" "--quantize int4"': 'for q in "--quantize int4"',
    r"epikv bench load": "epikv bench load --model model.pt --duration 1 --warmup 0 --measure 1",
    # Of an experiment that there is.
    r"epikv experiment report NAME": "epikv experiment init first.textproto"
    " && epikv experiment create first.textproto && epikv experiment start first"
    " && epikv experiment report first",
}
# Commands that take minutes however small, and the test that runs them.
TOO_LONG = {
    "epikv bench overload": "tests/e2e/load/bench_load_test.py",
    "epikv calibrate epikv_flat": "tests/e2e/policies/calibrate_epikv_flat_test.py",
}

# A command that goes on is in a terminal of its own.
EPIKV = """\
#!/bin/sh
PATH=$PATH:{tethers}
epikv() {{ exec {python} -c 'from epikv.cli import main; main()' "$@"; }}
case $1 in
  admin) shift; epikv admin --server=127.0.0.1:{admin_listen} "$@" ;;
  serve)
    epikv "$@" --experiment_store=experiments.db >serve.log 2>&1 &
    until epikv-probe 2>/dev/null; do
      kill -0 $! || {{ cat serve.log >&2; exit 1; }}
      sleep 0.1
    done ;;
  *) epikv "$@" ;;
esac
"""
EPIKVD = """\
#!/bin/sh
exec {binary} --listen=127.0.0.1:{listen} --admin_listen=127.0.0.1:{admin_listen} \\
  --metrics_listen=127.0.0.1:{metrics_listen} --threads=1 "$@"
"""
PYTHON_PROGRAM = """\
#!/bin/sh
PATH=$PATH:{tethers}
exec {python} "$@"
"""
PROBE = """\
#!/bin/sh
exec {binary} "$@" --listen=127.0.0.1:{listen}
"""


ALL = [block for page in pages() for block in blocks(page)]


def note(block: Block) -> re.Match[str] | None:
    return NOTE.fullmatch(block.note)


def to_run() -> list[Block]:
    return [block for block in ALL if block.has_commands and not note(block)]


def fault(block: Block) -> str | None:
    """What is wrong with how a block says whether it is run."""
    if not block.has_commands:
        if block.language in NO_COMMANDS:
            return None
        known = ", ".join((*SHELL[1:], *PYTHON, *NO_COMMANDS))
        return f"{block}: '{block.language}' is none of {known}: write one, or add it to the test"
    found = note(block)
    if found is None:
        if "<!--" in block.note:
            return f"{block}: write '<!-- run by TEST -->' or '<!-- not run: REASON -->' above it"
        if leaves := LEAVES.search(block.text):
            return f"{block}: with '{leaves[0]}' it is not run here: say so, and why, above it"
        return None
    if test := found["test"]:
        path = ROOT / test
        if not (path.name.endswith("_test.py") and path.is_relative_to(ROOT) and path.exists()):
            return f"{block}: '{test}' is no test: name the file of one from the root"
        if block.page not in path.read_text():
            return f"{block}: {test} does not name {block.page}: does it run the page's block?"
    return None


def strays(page: Path, root: Path = ROOT) -> list[str]:
    """Notes that stand above no block of commands."""
    used = {block.line - 1 for block in blocks(page, root) if block.has_commands}
    lines = enumerate(page.read_text().splitlines(), 1)
    name = page.relative_to(root)
    return [
        f"{name}:{at}: no block of commands begins in the next line"
        for at, line in lines
        if NOTE.fullmatch(line) and at not in used
    ]


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    assert len(to_run()) >= 8
    assert [found for block in ALL if (found := fault(block))] == []
    assert [found for page in pages() for found in strays(page)] == []


def test_few_are_not_run() -> None:
    left = [f"{block}: {found['reason']}" for block in ALL if (found := note(block))]
    left = [line for line in left if not line.endswith(": None")]
    assert len(left) <= MOST_NOT_RUN, "\n".join(["run some of these:", *left])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["```", "epikv policies", "```"], None),
        (["```text", "epikv policies", "```"], None),
        (["<!-- not run: it needs a GPU -->", "```", "x", "```"], None),
        (
            ["<!-- run by tests/e2e/pages/operating_test.py -->", "```", "x", "```"],
            "does not name page",
        ),
        (["<!-- run by tests/e2e/nothing_test.py -->", "```", "x", "```"], "is no test"),
        (["<!-- run by deploy/setup.sh -->", "```", "x", "```"], "is no test"),
        (["<!-- not run: -->", "```", "x", "```"], "write '<!-- run by"),
        (["<!-- runs elsewhere -->", "```", "x", "```"], "write '<!-- run by"),
        (["```", "cp deploy/epikvd.service /etc/systemd/system/", "```"], "with '/etc/systemd"),
        (["```", "epikvd --print_config >/etc/epikvd.textproto", "```"], "with '/etc/epikvd"),
        (["```python", "Path('/etc/epikvd').touch()", "```"], "with '/etc/epikvd"),
        (["```", "cp docs/errors.md ../errors.md", "```"], "with '..'"),
        (["```", "mkdir ~/models", "```"], "with '~'"),
        (["```", "python -m pip install x", "```"], "with '-m pip'"),
        (["```", "epikv generate ... >/dev/null # http://a/b and $PWD/c, x/y", "```"], None),
        (["1. A step", "", "   ```bahs", "   x", "   ```"], "'bahs' is none of"),
        (["<!-- not run: it needs a GPU -->", "", "```", "x", "```"], "no block of commands"),
    ],
)
def test_a_block_that_says_it_wrongly_is_found(
    lines: list[str], expected: str | None, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# A page", "", *lines, ""]))
    [block] = blocks(page, tmp_path)
    found = [*filter(None, [fault(block)]), *strays(page, tmp_path)]
    assert len(found) == (expected is not None)
    assert all(expected in line and line.startswith("page.md:") for line in found)


# Running them.


def smaller(text: str) -> str:
    """A block's commands as they are run here."""
    for before, after in SMALLER.items():
        text = re.sub(before, after, text)
    for command in TOO_LONG:
        text = re.sub(rf"^{command}\b(.*\\\n)*.*$", ":", text, flags=re.MULTILINE)
    return text


def test_what_is_made_smaller_is_there() -> None:
    shown = "\n".join(block.text for block in to_run())
    assert [before for before in SMALLER if not re.search(before, shown)] == []
    for command, test in TOO_LONG.items():
        assert re.search(rf"^{command}\b", shown, re.MULTILINE), command
        words = ", ".join(f'"{word}"' for word in command.split()[1:])
        assert words in (ROOT / test).read_text(), f"{test} does not run {command}"


def script(block: Block) -> str:
    """Its commands, in the lines that they have in the page."""
    text = commands(block)
    if block.language in PYTHON:
        return "\n" * block.line + text + "\n"
    told = f"echo {block.page}:$LINENO: status $?: $BASH_COMMAND >&2"
    first = f"set -eE -o pipefail; trap {shlex.quote(told)} ERR"
    return first + "\n" * block.line + smaller(text) + "\n"


def missing(shown: list[str], output: str) -> str | None:
    """The first shown line that does not come in its turn."""
    lines = iter(output.splitlines())
    for line in shown:
        pattern = re.escape(re.sub(r"\s+", " ", line)).replace(r"\.\.\.", ".*").replace("…", ".*")
        pattern = re.sub(r"\d+(\\\.\d+)*", r"\\d+(\\.\\d+)*", pattern).replace(r"\ ", r"\s+")
        if not any(re.fullmatch(pattern, given.strip()) for given in lines):
            return line
    return None


def test_what_a_page_shows_is_looked_for_in_its_order() -> None:
    output = "serving\n  speed   1048.0 tokens/s\npolicy epikv_flat\n"
    assert missing(["serving", "speed 2 tokens/s"], output) is None
    assert missing(["speed 917.25 tokens/s", "policy ..."], output) is None
    assert missing(["policy ...", "serving"], output) == "serving"
    assert missing(["policy h2o"], output) == "policy h2o"


@dataclass(frozen=True)
class Sandbox:
    """What looks like a checkout, with programs on PATH and a model."""

    folder: Path
    ports: dict[str, str]

    def make(self, sample_model: Path, sample_directory: Path, calibrated: Path) -> None:
        self.folder.mkdir()
        for name in ("deploy", "docs", "policies", "proto", "tools"):
            shutil.copytree(ROOT / name, self.folder / name)
        (self.folder / "tests" / "wire").mkdir(parents=True)
        node_modules = Path("tests") / "wire" / "node_modules"
        (self.folder / node_modules).symlink_to(ROOT / node_modules)
        shutil.copy(sample_model, self.folder / "model.pt")
        shutil.copytree(sample_directory, self.folder / "DIR")
        shutil.copytree(calibrated, self.folder / "artefacts")
        solved = problem("calibrate/0")
        (self.folder / "FILE").write_text(f"{solved.prompt} {solved.trace}")
        answer = str(next(iter(solved.answers.values())))
        asked = {"problem": solved.prompt, "answer": answer, "unique_id": "1"}
        for name in ("math500.jsonl", "aime24.jsonl"):
            (self.folder / name).write_text(f"{json.dumps(asked)}\n")
        self._write_problems(solved.prompt, answer)
        (self.folder / "chat.txt").write_text("{problem}")
        (self.folder / "report.txt").write_text(solved.prompt)
        (self.folder / "stdin").write_text("What is 2 + 3?\n")
        binary = find_binary()
        for name, program, of in (
            ("epikv", EPIKV, None),
            ("epikvd", EPIKVD, binary),
            ("epikv-probe", PROBE, binary.with_name("epikv-probe")),
            ("python", PYTHON_PROGRAM, None),
        ):
            path = self.folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            known = {"python": sys.executable, "binary": of, "tethers": self.folder / "tethers"}
            path.write_text(program.format(**known, **self.ports))
            path.chmod(0o755)
        (self.folder / "tethers").mkdir()
        for folder, programs in (("bin", PROGRAMS), ("tethers", TETHERS)):
            for program in programs:
                if found := shutil.which(program):
                    (self.folder / folder / program).symlink_to(found)

    def _write_problems(self, prompt: str, answer: str) -> None:
        """Files of benchmarks, and of one's own."""
        long = {"input": "Who?", "context": prompt, "answers": [answer], "dataset": "qasper"}
        for name, row in (
            ("mine.jsonl", {"prompt": prompt, "answer": answer}),
            ("qasper.jsonl", long),
            ("dataset2prompt.json", {"qasper": "{context} {input}"}),
        ):
            (self.folder / name).write_text(f"{json.dumps(row)}\n")
        (self.folder / "mmlu.csv").write_text("What is 2 + 3?,4,5,6,7,B\n")
        (self.folder / "check.py").write_text("def right(output, answer): return answer in output")

    def run(self, block: Block) -> str:
        """What it prints. Raises AssertionError where it fails."""
        wrong = fault(block)
        assert wrong is None, wrong  # before any of it is run
        text = script(block)
        for name, port in PORTS.items():
            text = text.replace(port, self.ports[name])
        file = self.folder / ("block.py" if block.language in PYTHON else "block.sh")
        file.write_text(text)
        program = self.folder / "bin" / "python" if block.language in PYTHON else BASH
        environment = ENVIRONMENT | {
            "PATH": str(self.folder / "bin"),
            "HOME": str(self.folder),
            "EPIKVD": str(self.folder / "bin" / "epikvd"),
            "EPIKV_SERVER": f"127.0.0.1:{self.ports['listen']}",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        out = self.folder / "out"
        with (self.folder / "stdin").open() as stdin, out.open("w") as stdout:
            running = subprocess.Popen(
                [program, file],
                cwd=self.folder,
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = running.wait(GENEROUS_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):  # what it left in the background
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        output = out.read_text()
        assert status is not None, f"{block} took more than {GENEROUS_SECONDS} s\n{output}"
        assert status == 0, f"{block} ended with status {status}\n{output}\n{ADVICE}"
        for word in ("not run", "refused, "):
            assert word not in output, f"{block}: an evaluation was refused\n{output}"
        line = missing(printed(block), output)
        assert line is None, f"{block} shows '{line}', which is not printed\n{output}"
        return output


@pytest.fixture(scope="module")
def served(
    sample_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The ports of a daemon that blocks ask which start none."""
    store = tmp_path_factory.mktemp("store") / "experiments.db"
    flags = [f"--experiment_store={store}", "--packet_bytes=100000000", "--session_bytes=100000000"]
    with Daemon(sample_model, "--threads=1", *flags) as daemon, Gateway(daemon.grpc) as gateway:
        addresses = (daemon.grpc, daemon.admin, daemon.metrics, gateway.address)
        ports = (address.rpartition(":")[2] for address in addresses)
        yield dict(zip(PORTS, ports, strict=True))


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest,
    served: dict[str, str],
    sample_model: Path,
    sample_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Block, "Future[str]"]]:
    """Of the blocks that are chosen; some run at once, for most of each is one core's."""
    made = artefacts(sample_directory, [STEERING])
    assert made is not None

    def run(block: Block) -> str:
        ports = free_ports(*PORTS) if STARTS_A_DAEMON.search(block.text) else served
        name = re.sub(r"\W", "-", str(block))
        sandbox = Sandbox(tmp_path_factory.getbasetemp() / f"block-{name}", ports)
        sandbox.make(sample_model, sample_directory, made)
        return sandbox.run(block)

    chosen = [
        item.callspec.params["block"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_a_block_runs.__name__
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        longest_first = sorted(chosen, key=lambda block: -len(block.text))
        yield {block: pool.submit(run, block) for block in longest_first}


@pytest.mark.parametrize("block", to_run(), ids=str)
def test_a_block_runs(block: Block, runs: dict[Block, "Future[str]"]) -> None:
    runs[block].result()


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("bash", "echo one\ncat nowhere\necho two", "page.md:8: status 1: cat nowhere"),
        ("python", "\nraise SystemExit(3)", "page.md:6 ended with status 3"),
        ("console", "$ echo 1 one\n2 one\n$ echo two\nthree", "shows 'three'"),
        ("", "epikv generate --nonsense", "No such option"),
        ("", "useradd --no-such-flag epikv", "page.md:7: status 127"),
        ("", "sh -c 'echo one'", "page.md:7: status 127"),
        ("", "cp docs/errors.md /etc/epikv-test", "with '/etc/epikv-test'"),
        ("", "epikv serve nothing.pt", "does not exist"),
    ],
)
def test_a_block_that_fails_is_found(
    language: str,
    text: str,
    expected: str,
    tmp_path: Path,
    sample_model: Path,
    sample_directory: Path,
) -> None:
    sandbox = Sandbox(tmp_path / "sandbox", free_ports(*PORTS))
    sandbox.make(sample_model, sample_directory, sample_directory / SHIPPED)
    with pytest.raises(AssertionError, match=re.escape(expected)):
        sandbox.run(Block("page.md", 6, language, text, ""))
