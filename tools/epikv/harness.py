"""What every command has that measures a daemon: options, models, and the daemon itself."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

import click

from epikv.client import Client
from epikv.connection import TLS_VARIABLES
from epikv.scrape import Page, scrape
from epikv.testing import Daemon, DaemonError, find_binary

Command = TypeVar("Command", bound=Callable[..., Any])


class Shape(TypedDict):
    """Of a random-weight model: options of `epikv.export.random`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: NotRequired[int]
    ffn: int
    vocab: int
    context: int
    dtype: str
    compile: NotRequired[bool]


ROOT = Path(__file__).resolve().parents[2]  # of a checkout
_EXPORTER = Path(__file__).resolve().parent / "export"
_begin = time.monotonic()


def options(command: Command) -> Command:
    """--server, --metrics and --binary, the arguments of `serving`; and --json as `json_file`."""
    for option in (
        click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path)),
        click.option(
            "--binary",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The epikvd to start. Default: $EPIKVD, the checkout's, which is built first, or"
            " the one on PATH.",
        ),
        click.option("--metrics", metavar="HOST:PORT", help="Of --server: its /metrics."),
        click.option(
            "--server",
            metavar="HOST:PORT",
            help="Measure this one; start none. It gets $EPIKV_TOKEN and $EPIKV_TLS_*.",
        ),
    ):
        command = option(command)
    return command


def say(line: str) -> None:
    """Tells people, on stderr, how far it has come."""
    click.echo(f"[{time.monotonic() - _begin:6.1f} s] {line}", err=True)


@dataclass(frozen=True)
class Served:
    """A daemon to measure."""

    client: Client
    address: str  # of its gRPC port
    metrics: str  # address; empty: not known
    pid: int | None = None  # None: somebody else's
    admin: str = ""  # address of its admin port; empty: not known

    def page(self) -> Page:
        return scrape(self.metrics)

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until no request holds KV cache."""
        deadline = time.monotonic() + seconds
        while self.page().total("epikv_requests_running") > 0:
            if time.monotonic() > deadline:
                raise click.ClickException(f"requests still run after {seconds} s")
            time.sleep(0.02)


def forget_tls() -> None:
    """The environment's TLS files are of another daemon: those of a benchmark speak plain text."""
    for name in TLS_VARIABLES:
        os.environ.pop(name, None)


@contextmanager
def serving(
    model: Callable[[], Path],
    flags: Sequence[str] = (),
    *,
    server: str | None,
    metrics: str | None,
    binary: Path | None,
    needs_metrics: bool = True,
) -> Iterator[Served]:
    """The daemon at `server`, or one of our own that serves what `model` makes."""
    if server is not None:
        if metrics is None and needs_metrics:
            raise click.UsageError("--server needs --metrics, the address of its /metrics")
        with Client(server) as client:
            yield Served(client, server, metrics or "")
        return
    try:
        binary = binary or fresh_binary(ROOT)
        path = model()
        forget_tls()
        say(f"starting epikvd on {path.name}")
        with Daemon(path, *flags, binary=binary) as daemon, daemon.client() as client:
            say(f"serving at {daemon.grpc}, metrics at {daemon.metrics}")
            yield Served(client, daemon.grpc, daemon.metrics, daemon.pid, daemon.admin)
    except DaemonError as error:
        raise click.ClickException(str(error)) from error


@cache
def fresh_binary(root: Path) -> Path:
    """The epikvd of $EPIKVD, or of the checkout at `root`, built once; if it is none, of PATH."""
    if os.environ.get("EPIKVD") or not (root / "deploy" / "setup.sh").exists():
        return find_binary()
    return build(root, "epikvd") / "server" / "epikvd"


BUILT = (
    "The epikvd to start. Default: $EPIKVD, the checkout's as it was built last, or the one on PATH;"
    " one is built where there is none."
)


def built_binary(given: Path | None) -> Path:
    """The epikvd that was `given`, or one that is there already; for commands that measure a model
    and not the daemon, where a build that nobody has asked for is in the way."""
    if given is not None:
        return given
    with contextlib.suppress(DaemonError):
        return find_binary()
    try:
        return fresh_binary(ROOT)
    except DaemonError as error:
        raise click.ClickException(str(error)) from error


def build(root: Path, target: str) -> Path:
    """The tree that it is built in."""
    setup = root / "deploy" / "setup.sh"
    say(f"building {target}")
    script = 'exec >&2; source "$1"; setup; build "$2"'  # stdout is for results
    built = subprocess.run(["bash", "-c", script, "bash", str(setup), target], check=False)
    if built.returncode != 0:
        raise click.ClickException(f"{target} could not be built: {setup} says why, above")
    return root / "build" / "dev"


def folder() -> Path:
    """Where benches keep what they build: the checkout's build/bench, else ./build/bench."""
    root = ROOT if (ROOT / "CMakeLists.txt").exists() else Path.cwd()
    path = root / "build" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def random_model(name: str, **shape: Unpack[Shape]) -> Path:
    """A random-weight model, made once."""
    path = cached(name, shape)
    if not path.exists():
        say(f"making {path.name}: {shape}")
        command = [sys.executable, "-m", "epikv.export.random", "--no-check"]
        for option, value in {**shape, "name": name, "out": path}.items():
            flag = f"--{option.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode != 0:
            raise click.ClickException(f"{' '.join(command)}\n{made.stderr}")
    return path


def cached(name: str, content: Mapping[str, Any], sources: Sequence[Path] = ()) -> Path:
    """A file name that changes with `content`, the files `sources`, and the exporter."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for source in [*sorted(_EXPORTER.glob("*.py")), *sorted(sources)]:
        digest.update(source.read_bytes())
    return folder() / f"{name}-{digest.hexdigest()[:12]}.pt"
