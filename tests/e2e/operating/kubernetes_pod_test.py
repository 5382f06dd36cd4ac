"""The pod of deploy/kubernetes, run here: its commands, probes, mounts and read-only root, without a cluster.

In the place of the images are this machine's programs, the daemon and the package that are tested; tests/container.sh
runs the pod with the image.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from credentials import authority, new_token, signed
from epikv.sample import problem
from kustomized import KUBERNETES, Object, build
from pods import Image, Pod, of_this_machine, why_not
from waiting import eventually

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no pod can be run here: {WHY_NOT}")
PORT = 8080
TASK = problem(9)
# So that a stream has not ended before the daemon is told to stop.
LONG = 900


def built(folder: Path, digest: str, *components: str) -> list[Object]:
    """An overlay of the base with this model, as docs/kubernetes.md says to make one."""
    folder.mkdir()
    above = os.path.relpath(KUBERNETES, folder)
    model = [f"MODEL_URL=http://127.0.0.1:{PORT}/sample.pt", f"MODEL_SHA256={digest}"]
    store = "postgresql://epikv@127.0.0.1:1/epikv?sslmode=verify-full&sslrootcert=/run/epikv/postgres/ca.crt"
    generated: list[Object] = [{"name": "epikvd-model", "behavior": "merge", "literals": model}]
    if "experiments" in components:
        literals = [f"EXPERIMENT_STORE={store}"]
        generated += [{"name": "epikvd-experiments", "literals": literals}]
    overlay = {
        "resources": [f"{above}/base"],
        "components": [f"{above}/components/{name}" for name in components],
        "configMapGenerator": generated,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return build(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    return of_this_machine(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def digest(sample_model: Path) -> str:
    return hashlib.sha256(sample_model.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def token() -> tuple[str, str]:
    return new_token("ann", "user")


@pytest.fixture(scope="module")
def pod(
    digest: str,
    images: dict[str, Image],
    token: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("plain")
    objects = built(folder / "overlay", digest)
    secrets = {"epikvd-tokens": {"tokens": token[1].encode()}}
    made = Pod(objects, "epikvd", folder / "pod", images, secrets)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def fetched(pod: Pod, sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the initContainer says: of another file, of the right one, and when it is there."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "sample.pt").write_bytes(b"another")
    server = pod.begin("serve", str(folder), str(PORT))
    said = []
    try:
        assert server.stdout is not None and server.stdout.readline() == "serves\n"
        wrong = pod.start("fetch-model")
        assert wrong.wait() == 1
        assert list(pod.volume("models").iterdir()) == []
        said.append(wrong.log)
        shutil.copy(sample_model, folder / "sample.pt")
        right = pod.start("fetch-model")
        assert right.wait() == 0, right.log
        said.append(right.log)
    finally:
        server.kill()
        server.wait()
    again = pod.start("fetch-model")
    assert again.wait() == 0, again.log
    return [*said, again.log]


def test_a_model_of_another_digest_is_not_kept(fetched: list[str], digest: str) -> None:
    other = hashlib.sha256(b"another").hexdigest()
    assert f"SHA-256 is {other}, and MODEL_SHA256 is {digest}" in fetched[0]


def test_a_model_is_fetched_once(pod: Pod, fetched: list[str], sample_model: Path) -> None:
    """The second time there is no server to ask."""
    assert "/models/model.pt was fetched" in fetched[1]
    assert fetched[2] == "/models/model.pt is there\n"
    assert (pod.volume("models") / "model.pt").read_bytes() == sample_model.read_bytes()


def test_a_file_that_was_changed_is_not_loaded(pod: Pod, fetched: list[str]) -> None:
    """The daemon looks at the digest, too."""
    daemon = pod.start("epikvd", MODEL_SHA256="1" * 64)
    assert daemon.wait() != 0
    assert "model_digests" in daemon.log


def test_the_pod_serves_and_drains(pod: Pod, fetched: list[str], token: tuple[str, str]) -> None:
    gateway = pod.start("gateway")
    pod_url = "http://127.0.0.1:8000"
    while pod.probe(gateway, "livenessProbe")[0] != 0:
        assert not gateway.ended(), gateway.log
    assert pod.probe(gateway, "readinessProbe") == (1, "503"), "there is no daemon yet"

    daemon = pod.start("epikvd")
    pod.until_ready(daemon)
    assert pod.probe(daemon, "livenessProbe")[0] == 0
    pod.until_ready(gateway)

    # What the security context asks for.
    status = daemon.status()
    assert status["Uid"].split() == ["10001"] * 4 and status["Gid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    for path in ("/file", "/models/file", "/etc/epikv/file", "/run/epikv/tokens/file"):
        assert "Read-only file system" in daemon.run("touch", path)[1], path
    assert daemon.run("touch", "/var/lib/epikv/file") == (0, "")

    # Clients, over both ports, with a token and without.
    asked = ["generate", "--server", "127.0.0.1:50051", "-n", "8", TASK.prompt]
    assert pod.ask("epikv", *asked, EPIKV_TOKEN=token[0])[0] == 0
    refused, said = pod.ask("epikv", *asked)
    assert refused != 0 and "token" in said
    short = pod.ask("complete", pod_url, TASK.prompt, "4", TOKEN=token[0])
    assert short == (0, "begun\nended: length")
    assert pod.ask("complete", pod_url, TASK.prompt, "4", TOKEN="none") == (1, "401")
    metrics = pod.ask("get", "http://127.0.0.1:9464/metrics")[1]
    assert "\nepikv_requests_finished_total{" in metrics
    assert '"method":"GenerationService/Generate"' in daemon.log, (
        "the access log is the container's"
    )

    # The end: what is before SIGTERM, a stream that goes on through the gateway, and the sidecar last.
    stream = pod.begin("complete", pod_url, TASK.prompt, str(LONG), TOKEN=token[0])
    assert stream.stdout is not None and stream.stdout.readline() == "begun\n"
    [sleep, _] = daemon.probes["lifecycle"]["preStop"]["exec"]["command"]
    assert daemon.run(sleep, "0") == (0, "")
    daemon.terminate()
    while pod.probe(daemon, "readinessProbe")[0] == 0:
        assert not daemon.ended(), "it was never unready"
    assert pod.probe(daemon, "livenessProbe")[0] == 0, "it drains, and is not killed for it"
    assert stream.communicate(timeout=60)[0] == "ended: length\n"
    assert daemon.wait(pod.spec["terminationGracePeriodSeconds"]) == 0, daemon.log
    gateway.terminate()
    assert gateway.wait() == 0, gateway.log


def test_with_tls_and_a_store_that_is_away(
    pod: Pod,
    fetched: list[str],
    images: dict[str, Image],
    digest: str,
    token: tuple[str, str],
    tmp_path: Path,
) -> None:
    """The components: Secrets of certificates, exec probes, and records in the spool's volume."""
    authority(tmp_path, "ca")
    signed(tmp_path, "server", "ca", "DNS:epikvd,DNS:localhost,IP:127.0.0.1")
    files = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}
    secrets = {
        "epikvd-tokens": {"tokens": token[1].encode()},
        "epikvd-tls": {name: (tmp_path / file).read_bytes() for name, file in files.items()},
        "epikvd-postgres": {"password": b"none", "ca.crt": (tmp_path / "ca.pem").read_bytes()},
    }
    objects = built(tmp_path / "overlay", digest, "tls", "experiments")
    secure = Pod(objects, "epikvd", tmp_path / "pod", images, secrets)
    try:
        shutil.copy(pod.volume("models") / "model.pt", secure.volume("models"))
        gateway = secure.start("gateway")
        daemon = secure.start("epikvd")
        secure.until_ready(daemon)
        assert secure.probe(daemon, "livenessProbe") == (0, "")
        secure.until_ready(gateway)
        url = "https://127.0.0.1:8000"
        asked = secure.ask("complete", url, TASK.prompt, "4", TOKEN=token[0])
        assert asked == (0, "begun\nended: length")
        assert secure.ask("get", "http://127.0.0.1:8000/health")[0] == 1, "in plain text"
        assert secure.ask("health", "50051", "")[0] == 1, "in plain text"
        eventually(lambda: "experiment store cannot be reached" in daemon.log)
        assert (secure.volume("spool") / "spool").stat().st_uid == 10001
        # A Secret that changes: the kubelet puts another version behind the link.
        tokens = secure.volume("tokens")
        (tokens / "..2").mkdir()
        other, line = new_token("bea", "user")
        (tokens / "..2" / "tokens").write_text(line)
        (tokens / "..new").symlink_to("..2")
        (tokens / "..new").rename(tokens / "..data")
        while secure.ask("complete", url, TASK.prompt, "1", TOKEN=other)[0] != 0:
            assert not daemon.ended()
        assert secure.ask("complete", url, TASK.prompt, "1", TOKEN=token[0]) == (1, "401")
        daemon.terminate()
        assert daemon.wait() == 0, daemon.log
        gateway.terminate()
        assert gateway.wait() == 0, gateway.log
    finally:
        secure.stop()
