"""Where an engine's time goes, ours or a peer's: perf's samples of it while it runs jobs of one
cell of `epikv bench peers`, as a table of functions and, if asked, a flame graph.

perf is the Linux kernel's (Debian: linux-perf), and so is the script that makes the flame graph; the
page that it fills in is d3-flame-graph's, fetched once with npm.
"""

import itertools
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from epikv import harness

from epikv_lab.bench.targets import finish

D3_FLAME_GRAPH = "4.1.3"  # the last whose package has the page
_PAGE = "package/dist/templates/d3-flamegraph-base.html"
_HERTZ = 499  # no multiple of what else happens regularly
JOB_SECONDS = 600  # that a job may take
_STACK = 16384  # bytes copied of each sample's, to unwind: LibTorch keeps no frame pointers


@dataclass(frozen=True)
class Function:
    share: float  # of the samples
    library: str
    name: str


@click.command("profile")
@click.option("--shape", type=click.Choice(["small", "0.5b"]), default="0.5b", show_default=True)
@click.option("--cell", "cell_name", default="streams16", show_default=True, help="As of peers.")
@click.option("--engine", default="epikv bf16", show_default=True, help="As of peers, whole.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seconds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--least", default=0.005, show_default=True, help="Share that is worth a row.")
@click.option(
    "--flame",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A page to write, with the flame graph.",
)
@click.option(
    "--binary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The epikvd to look at. Default: as of other benches.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    shape: str,
    cell_name: str,
    engine: str,
    threads: int,
    seconds: int,
    least: float,
    flame: Path | None,
    binary: Path | None,
    json_file: Path | None,
) -> None:
    """Where the daemon's time goes, or a peer's, by perf: hot functions, and a flame graph."""
    from epikv_lab.bench.peers import cells, checkpoint, engines, venvs
    from epikv_lab.bench.peers.process import ENVIRONMENT
    from epikv_lab.bench.peers.rounds import pool_tokens

    if shutil.which("perf") is None:
        raise click.ClickException("perf is not there (Debian: apt-get install linux-perf)")
    try:
        chosen = cells.parse(cell_name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if len(chosen) > 1:
        raise click.UsageError(f"'{cell_name}' is {len(chosen)} cells; one is looked at")
    cell = chosen[0]
    known = [arm for arm in engines.arms() if arm.takes_part(cell)]
    arm = next((arm for arm in known if arm.name == engine), None)
    if arm is None:
        names = ", ".join(arm.name for arm in known)
        raise click.UsageError(f"no engine of {cell.name} is called '{engine}'; there are {names}")
    of_shape = checkpoint.SHAPES[shape]
    weights = checkpoint.checkpoint(of_shape, shape, venvs.folder())
    place = engines.Place(of_shape, weights, threads, pool_tokens([cell]), binary)
    samples = harness.folder() / "perf.data"
    harness.forget_tls()
    os.environ.update(ENVIRONMENT)
    try:
        with closing(arm.start(place)) as served:

            def job(seed: int) -> None:
                served.run(cell.job(of_shape.vocabulary, seed, arm.kv), JOB_SECONDS)

            with _busy(job):
                record(served.pid, seconds, samples)
    except venvs.Refused as refused:
        raise click.ClickException(f"{engine}: {refused}") from refused
    harness.say(f"perf's samples are in {samples}")
    found = functions(samples)
    click.echo(f"\n{table(found, least)}\n")
    if flame is not None:
        draw(samples, flame)
        harness.say(f"wrote {flame}")
    details = {"cell": cell.name, "engine": engine, "functions": [asdict(each) for each in found]}
    finish("profile", [], details, json_file, untargeted="it says where time goes")


@contextmanager
def _busy(job: Callable[[int], object]) -> Iterator[None]:
    """Jobs run one after another meanwhile; the first of them has ended before."""
    job(0)
    over = threading.Event()

    def work() -> None:
        for seed in itertools.count(1):
            if over.is_set():
                return
            job(seed)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            over.set()
        working.result()


def record(pid: int, seconds: int, samples: Path) -> None:
    stacks = ["-g", "--call-graph", f"dwarf,{_STACK}"]
    _perf("record", "-q", "-F", str(_HERTZ), *stacks, "-p", str(pid), "-o", str(samples),
          "--", "sleep", str(seconds))  # fmt: skip


def functions(samples: Path) -> list[Function]:
    """The hottest first."""
    told = _perf("report", "-i", str(samples), "--stdio", "-q", "--no-children", "-g", "none",
                 "--no-inline", "--fields", "overhead,dso,symbol", "-t", "\t")  # fmt: skip
    found = []
    for line in filter(str.strip, told.splitlines()):
        share, library, name = (part.strip() for part in line.split("\t", 2))
        found.append(Function(float(share.rstrip("%")) / 100, library, name.partition("] ")[2]))
    return found


def table(found: list[Function], least: float) -> str:
    """As Markdown."""
    shown = [each for each in found if each.share >= least]
    rest = sum(each.share for each in found) - sum(each.share for each in shown)
    return "\n".join(
        [
            "| share | function | of |",
            "|---|---|---|",
            *(f"| {each.share:.1%} | `{each.name}` | {each.library} |" for each in shown),
            f"| {rest:.1%} | {len(found) - len(shown)} others | |",
        ]
    )


def draw(samples: Path, page: Path) -> None:
    """Writes a flame graph. The script looks for the samples' header in perf.data of the working
    folder, wherever it has the samples from: they have to be a file of that name."""
    script = f"{_perf('--exec-path').strip()}/scripts/python/flamegraph.py"
    _perf("script", "-i", samples.name, "--no-inline", "-s", script, "--",
          f"--template={template()}", f"--output={page.resolve()}", folder=samples.parent)  # fmt: skip


def template() -> Path:
    """The page that perf's script fills in."""
    path = harness.folder() / f"d3-flame-graph-{D3_FLAME_GRAPH}.html"
    if not path.exists():
        package = f"d3-flame-graph@{D3_FLAME_GRAPH}"
        _run("npm", "pack", "--silent", "--pack-destination", str(path.parent), package)
        archive = path.with_suffix(".tgz")
        with tarfile.open(archive) as packed:
            page = packed.extractfile(_PAGE)
            assert page is not None  # it is a file
            path.write_bytes(page.read())
        archive.unlink()
    return path


def _perf(*arguments: str, folder: Path | None = None) -> str:
    return _run("perf", *arguments, folder=folder)


def _run(*command: str, folder: Path | None = None) -> str:
    """What it writes, in that working folder. Raises ClickException with what it says when it
    fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise click.ClickException(f"{' '.join(command[:2])}: {said}")
    return done.stdout
