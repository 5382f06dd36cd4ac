"""docs/operating.md, pasted: each of its commands, one after another in one shell, for real.

Other than there are ports, and what a checkout would have: models, and programs on PATH.
"""

import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from epikv.testing import find_binary
from prometheus_tool import tool
from shell import GENEROUS_SECONDS, Shell, free_ports

ROOT = Path(__file__).parents[3]
PORTS = {"listen": "50051", "admin_listen": "50052", "metrics_listen": "9464", "prometheus": "9099"}

EPIKV = """\
#!/bin/sh
[ "$1" = admin ] && shift && set -- admin --server=127.0.0.1:{admin_listen} "$@"
exec {python} -c 'from epikv.cli import main; main()' "$@"
"""
EPIKVD = """\
#!/bin/sh
exec {binary} "$@" --admin_listen=127.0.0.1:{admin_listen} --metrics_listen=127.0.0.1:{metrics_listen}
"""


def commands() -> list[str]:
    """Of the section's first block; what goes on in the next line is one."""
    _, _, section = (ROOT / "docs" / "operating.md").read_text().partition("# Operating it\n")
    return section.split("```")[1].strip().replace("\\\n", "").splitlines()


@pytest.fixture
def ports() -> dict[str, str]:
    return free_ports(*PORTS)


@pytest.fixture
def shell(sample_model: Path, tmp_path: Path, ports: dict[str, str]) -> Iterator[Shell]:
    """In what looks like a checkout that the quickstart has built."""
    for name in ("model.pt", "b.pt", "new.pt"):
        shutil.copy(sample_model, tmp_path / name)
    shutil.copytree(ROOT / "deploy" / "prometheus", tmp_path / "deploy" / "prometheus")
    config = tmp_path / "deploy" / "prometheus" / "prometheus.yml"
    target = f":{PORTS['metrics_listen']}"
    text = config.read_text()
    assert target in text and "15s" in text
    config.write_text(text.replace(target, f":{ports['metrics_listen']}").replace("15s", "1s"))
    built, installed = tmp_path / "build" / "dev" / "server", tmp_path / ".venv" / "bin"
    for program, script in (
        (built / "epikvd", EPIKVD),
        (installed / "epikv", EPIKV),
        (installed / "python", '#!/bin/sh\nexec {python} "$@"\n'),
    ):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(script.format(binary=find_binary(), python=sys.executable, **ports))
        program.chmod(0o755)
    (built / "epikv-probe").symlink_to(find_binary().with_name("epikv-probe"))
    started = Shell(tmp_path)
    try:
        yield started
    finally:
        started.kill()


def is_for_those_who_may(shell: Shell, generate: str) -> None:
    """With ann's token in the environment."""
    refused = shell.refused(f"EPIKV_TOKEN= {generate}")
    assert "UNAUTHENTICATED" in refused and "$EPIKV_TOKEN" in refused
    refused = shell.refused(f"EPIKV_TLS_CA= {generate}")
    assert "UNAVAILABLE" in refused and "$EPIKV_TLS_CA" in refused
    assert "'b', 'sample'" in shell.refused(generate.replace("--model b", ""))
    for host in ("localhost", "127.0.0.1"):
        assert shell.ok(generate.replace("$(hostname)", host))
    for command in ("status", "requests", "drain", "config max_queued_requests=1"):
        assert "PERMISSION_DENIED" in shell.refused(f"epikv admin {command}")


def is_scraped(ports: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{ports['prometheus']}/api/v1/query?query=up"
    deadline = time.monotonic() + GENEROUS_SECONDS
    found = []
    while [one["value"][1] for one in found] != ["1"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                found = json.load(reply)["data"]["result"]
        except urllib.error.URLError:  # it is starting
            continue
    assert found[0]["metric"]["job"] == "epikv"
    with urllib.request.urlopen(url.replace("query?query=up", "rules"), timeout=10) as reply:
        assert json.load(reply)["data"]["groups"][0]["rules"]


def is_drained(shell: Shell, generate: str) -> None:
    probe = "epikv-probe{} --config=epikvd.textproto"
    assert "NOT_SERVING" in shell.refused(probe.format(""))
    shell.ok(probe.format(" liveness"))
    assert "DRAINING" in shell.refused(generate)


def test_pasting_it_runs_a_daemon_from_its_certificate_to_its_end(
    shell: Shell, ports: dict[str, str], tmp_path: Path
) -> None:
    tool("prometheus")
    (generate,) = (command for command in commands() if command.startswith("epikv generate"))
    generate = generate.partition("#")[0].replace(PORTS["listen"], ports["listen"])

    def shows(*expected: str) -> Callable[[str], None]:
        def check(out: str) -> None:
            words = " ".join(out.replace("│", " ").split())
            assert all(text in words for text in expected), out

        return check

    def loads(out: str) -> None:
        assert [model["model"] for model in json.loads(out)["models"]] == ["b", "sample"]

    # What holds after each command that is there to be looked at, by how it begins.
    after: dict[str, Callable[[str], object]] = {
        "until epikv-probe": lambda _: shell.ok("epikv-probe models/b --config=epikvd.textproto"),
        "epikv generate": lambda _: is_for_those_who_may(shell, generate),
        "prometheus": lambda _: is_scraped(ports),
        "problem=": lambda _: shell.ok('[ -n "$problem" ]'),
        "epikv admin status": shows(": serving since", "b serving 0 sample serving 0"),
        "epikv admin requests": shows("no request is live"),
        "epikv admin load --json": loads,
        "epikv admin load-model new.pt": shows("b serves: float32"),
        "epikv admin config max_queued_requests=64": shows("max_queued_requests 64"),
        "epikv admin drain": lambda _: is_drained(shell, generate),
        "epikv admin resume": lambda _: shell.ok(generate),
        "kill $daemon": lambda _: None,
    }
    left = dict(after)
    for command in commands():
        for name, port in PORTS.items():
            command = command.replace(port, ports[name])
        out = shell.ok(command)
        for begin in [begin for begin in left if command.startswith(begin)]:
            left.pop(begin)(out)
    assert not left
    log = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    called = {(call.get("identity", ""), call["code"]) for call in log}
    assert {("ann", "OK"), ("ops", "OK")} <= called
