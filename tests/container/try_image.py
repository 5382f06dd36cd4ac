"""Runs an unpacked image as a container engine would, and looks at it from outside and inside.

The engine here is util-linux: namespaces of its own, the root read-only, no capability, the user,
environment and commands that the image names. Limits are shown as a cgroup shows them, and not
enforced. Run by tests/container.sh, as root.
"""

import argparse
import ctypes
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epikv import Accepted, Client, Kv, Stop, Summary
from epikv.sample import problem
from epikv.sample.demo import demo
from epikv.scrape import scrape
from epikv.testing import PACED

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fixtures" / "python"))
from credentials import new_token  # noqa: E402
from kustomized import build  # noqa: E402
from pods import Image, Pod  # noqa: E402

REQUIREMENTS = ROOT / "tools" / "requirements"
START_SECONDS = 120
STOP_SECONDS = 60
# The memory limit that is shown, and what of it is in use: by processes, and by cached files.
LIMIT_BYTES, PROCESS_BYTES, CACHED_BYTES = 1 << 30, 100 << 20, 800 << 20
CLONE_NEWNET = 0x40000000

# $1: the root, $2: models, $3: a cgroup's files, $4: user:group; then the command.
RUN = """
ip link set lo up
root=$1
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/sys"
mkdir -p "$root/sys/fs/cgroup"
mount --bind "$3" "$root/sys/fs/cgroup"
mount --bind "$2" "$root/models"
mount -o remount,bind,ro "$root/models"
user=$4
shift 4
exec chroot --userspec="$user" --groups= "$root" "$@"
"""


def environment_of(config: dict[str, Any]) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in config["Env"])


class Container:
    """The image's entry point, and flags of the user's, as process 1 of namespaces of its own."""

    def __init__(
        self,
        root: Path,
        config: dict[str, Any],
        models: Path,
        cgroup: Path,
        log: Path,
        flags: tuple[str, ...],
    ):
        self._config = config
        names = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork")
        arguments = [str(root), str(models), str(cgroup), config["User"]]
        arguments += [*config["Entrypoint"], *flags]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["unshare", *names, "bash", "-euc", RUN, "run", *arguments],
                env=self._environment(),
                stdout=output,
                stderr=output,
            )

    def _environment(self) -> dict[str, str]:
        return environment_of(self._config)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of process 1, as it is called outside."""
        return int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())

    def status(self) -> dict[str, str]:
        """Of process 1, from /proc."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}

    def run(self, *command: str) -> tuple[int, str]:
        """A command inside, by the same user: its exit status and output."""
        user, group = self._config["User"].split(":")
        inside = ("--mount", "--pid", "--net", "--ipc", "--root", "--wd")
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), *inside]
            + ["--setgid", group, "--setuid", user, "--", *command],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def health(self) -> tuple[int, str]:
        kind, *command = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*command)

    def liveness(self) -> tuple[int, str]:
        """The same, as a probe that kills asks."""
        probe, *flags = self._config["Healthcheck"]["Test"][1:]
        return self.run(probe, "liveness", *flags)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def running(root: Path, config: dict[str, Any], models: Path, *flags: str) -> Iterator[Container]:
    with tempfile.TemporaryDirectory() as folder:
        cgroup = Path(folder, "cgroup")
        cgroup.mkdir()
        files = {
            "cgroup.controllers": "cpu memory",
            "cpu.max": "100000 100000",
            "memory.max": LIMIT_BYTES,
            "memory.current": PROCESS_BYTES + CACHED_BYTES,
            "memory.stat": f"anon {PROCESS_BYTES}\ninactive_file {CACHED_BYTES}",
        }
        for name, value in files.items():
            (cgroup / name).write_text(f"{value}\n")
        container = Container(root, config, models, cgroup, Path(folder, "log"), flags)
        try:
            yield container
        except BaseException:
            print(container.log)
            raise
        finally:
            container.kill()


def enter_network(container: Container) -> None:
    """This process's, from now on: its ports are ours."""
    with Path(f"/proc/{container.pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def port_of(config: dict[str, Any], which: int) -> str:
    """127.0.0.1 with one of the ports that the image names, in order."""
    return f"127.0.0.1:{sorted(int(port.split('/')[0]) for port in config['ExposedPorts'])[which]}"


def await_health(container: Container) -> list[str]:
    """What was said before it was healthy."""
    said: list[str] = []
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert not container.ended(), "it ended"
        try:
            status, output = container.health()
        except ValueError:  # process 1 is not there yet
            continue
        if status == 0:
            return said
        said.append(output)
        assert time.monotonic() < deadline, said[-1]
        time.sleep(0.1)


def passed(what: str) -> None:
    print(f"ok  {what}", flush=True)


def look_at_files(root: Path) -> None:
    libraries = sorted(path.name for path in (root / "opt/libtorch/lib").iterdir())
    assert libraries == ["libc10.so", "libgomp.so.1", "libtorch_cpu.so"], libraries
    for pattern in ("python*", "gcc*", "g++*", "cmake*"):
        assert not list((root / "usr/bin").glob(pattern)), pattern
    assert not list(root.glob("usr/lib/**/libcu*")) and not list(root.glob("var/lib/apt/lists/*_*"))
    assert not (root / "etc/pip.conf").exists() and not (root / "run/secrets").exists()
    passed(f"of LibTorch: {', '.join(libraries)}; no compiler, Python, CUDA or secret")
    for name in ("LICENSE", "NOTICE", "libtorch/LICENSE", "xgrammar/LICENSE", "xgrammar/NOTICE"):
        assert (root / "usr/share/doc/epikvd" / name).stat().st_size > 0, name
    passed("licences of what is in no Debian package")


def inside(root: Path, *command: str) -> list[str]:
    """What a command prints, in lines, as root in the image."""
    done = subprocess.run(
        ["chroot", str(root), *command], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def look_at_bill(root: Path, config: dict[str, Any]) -> None:
    """The bill of materials names each package of the image, and what the daemon links."""
    bill = json.loads((root / "usr/share/doc/epikvd/sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["bom-ref"]: part for part in bill["components"]}
    debian = {
        (part["name"], part["version"]): ref
        for ref, part in parts.items()
        if part.get("purl", "").startswith("pkg:deb/debian/") and "arch=source" not in part["purl"]
    }
    lines = inside(root, "dpkg-query", "-W", "-f=${Package} ${Version}\n")
    packages = dict(line.split() for line in lines)
    missing = packages.items() - debian.keys()
    assert len(packages) > 80 and not missing, missing
    passed(f"the bill of materials names all {len(packages)} Debian packages")

    daemon, labels = parts["epikvd"], config["Labels"]
    assert daemon["version"] == labels["org.opencontainers.image.version"]
    commit = {"name": "commit", "value": labels["org.opencontainers.image.revision"]}
    assert commit in daemon["properties"]
    [links] = [each["dependsOn"] for each in bill["dependencies"] if each["ref"] == "epikvd"]
    libraries = [line.split() for line in inside(root, "ldd", "/usr/local/bin/epikvd")]
    paths = [words[2] for words in libraries if words[1:2] == ["=>"]]
    of_torch = [path for path in paths if path.startswith("/opt/libtorch/")]
    assert len(paths) > 30 and len(of_torch) == 3
    for path in set(paths) - set(of_torch):
        # dpkg knows some files of /usr/lib as files of /lib.
        owner = inside(root, "dpkg-query", "-S", f"*{path.removeprefix('/usr')}")[0].split(":")[0]
        assert debian[owner, packages[owner]] in links, f"{owner} has {path}"
    assert {"torch", "xgrammar"} <= set(links)
    for name, file in (("torch", "torch-cpu.txt"), ("xgrammar", "xgrammar.txt")):
        lock = (REQUIREMENTS / file).read_text()
        assert f"{name}=={parts[name]['version']} " in lock
        [digest] = parts[name]["hashes"]
        assert digest["alg"] == "SHA-256" and f"sha256:{digest['content']}" in lock
    passed(f"and whose the {len(paths)} libraries are that the daemon links; torch by its hash")


def try_image(root: Path, config: dict[str, Any], models: Path) -> None:
    assert config["StopSignal"] == "SIGTERM"
    look_at_files(root)
    look_at_bill(root, config)
    with running(root, config, models) as container:
        assert container.wait() != 0 and "set --auth_tokens_file, or --allow" in container.log
        passed("it does not serve everyone unless it is told to")
    with running(root, config, models, "--allow_anonymous") as container:
        said = await_health(container)
        passed(f"healthy; before that: {said[-1] if said else 'nothing asked'}")
        enter_network(container)
        metrics, grpc = port_of(config, 0), port_of(config, 1)

        status = container.status()
        uid, gid = config["User"].split(":")
        assert status["Uid"].split() == [uid] * 4 and status["Gid"].split() == [gid] * 4
        assert status["Groups"] == "" and int(status["CapEff"], 16) == 0 and uid != "0"
        assert "Read-only file system" in container.run("touch", "/tmp/file")[1]
        passed(f"process 1 is user {uid} without capabilities on a read-only root")

        assert demo(grpc, seed=9, policy="epikv_flat", budget=384)
        passed("the completion is right")

        page = scrape(metrics)
        assert page.total("epikv_requests_finished_total", policy="epikv_flat") == 1
        capacity = page.total("epikv_kv_capacity_bytes")
        half = (LIMIT_BYTES - PROCESS_BYTES) / 2  # kv_memory_share; weights and scratch are small
        assert 0.9 * half < capacity <= half, (capacity, half)
        assert page.total("epikv_threads") == 1
        passed(f"metrics; a KV pool of {capacity / 1e6:.0f} MB under a limit of 1 GiB")

        # A stream that is not read cannot end, and a drain waits for it.
        with Client(grpc, PACED) as client:
            stream = client.generate(problem(9).prompt, kv=Kv("sliding", 300), stop=Stop(900))
            assert isinstance(next(stream), Accepted)
            os.kill(container.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while (health := container.health())[0] == 0:
                assert time.monotonic() < deadline
            assert health == (1, f"epikv-probe: {grpc} is NOT_SERVING"), health
            assert container.liveness() == (0, "")
            passed(f"unhealthy while it drains, and alive: {health[1]}")
            assert isinstance(list(stream)[-1], Summary)
        status = container.wait()
        assert status == 0, status
        passed("the stream ended in order, and the daemon with status 0")


def try_pod(image: Image, models: Path) -> None:
    """The daemon's container of deploy/kubernetes, as tests/e2e/operating/kubernetes_pod_test.py runs it without an
    image: settings, tokens and model where the manifest mounts them, its probes, its end."""
    token, line = new_token("ann", "user")
    objects = build(ROOT / "deploy" / "kubernetes" / "overlays" / "small")
    secrets = {"epikvd-tokens": {"tokens": line.encode()}}
    with tempfile.TemporaryDirectory() as folder:
        pod = Pod(objects, "epikvd", Path(folder, "pod"), {"epikvd": image}, secrets)
        try:
            model = (models / "model.pt").read_bytes()
            (pod.volume("models") / "model.pt").write_bytes(model)
            daemon = pod.start("epikvd", MODEL_SHA256=hashlib.sha256(model).hexdigest())
            pod.until_ready(daemon)
            assert pod.probe(daemon, "livenessProbe")[0] == 0
            status = daemon.status()
            assert status["Uid"].split()[0] == "10001" and int(status["CapBnd"], 16) == 0
            assert "Read-only file system" in daemon.run("touch", "/file")[1]
            assert daemon.run("touch", "/var/lib/epikv/file") == (0, "")
            asked = ["generate", "--server", "127.0.0.1:50051", "-n", "8", problem(9).prompt]
            assert pod.ask("epikv", *asked, EPIKV_TOKEN=token)[0] == 0
            assert pod.ask("epikv", *asked)[0] != 0
            [sleep, _] = daemon.probes["lifecycle"]["preStop"]["exec"]["command"]
            assert daemon.run(sleep, "0") == (0, "")
            daemon.terminate()
            assert daemon.wait(pod.spec["terminationGracePeriodSeconds"]) == 0, daemon.log
        finally:
            pod.stop()
    passed("the daemon's container of deploy/kubernetes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the unpacked image")
    parser.add_argument(
        "--config", type=Path, required=True, help="the image's configuration, JSON"
    )
    parser.add_argument("--models", type=Path, required=True, help="folder with model.pt")
    given = parser.parse_args()
    config = json.loads(given.config.read_text())["config"]
    print(f"runs {shlex.join(config['Entrypoint'])}")
    image = Image(given.root, tuple(config["Entrypoint"]), environment=environment_of(config))
    try_pod(image, given.models)  # before what enters another network
    try_image(given.root, config, given.models)


if __name__ == "__main__":
    main()
