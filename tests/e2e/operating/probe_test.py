"""epikv-probe, as a container's health check calls it, against the real daemon."""

import subprocess
from pathlib import Path

from admin_calls import admin_of
from credentials import authority, signed
from epikv import Tls
from epikv.testing import Daemon, find_binary


def probe(*args: str) -> tuple[int, str]:
    """Its exit status and all that it printed."""
    binary = find_binary().with_name("epikv-probe")
    done = subprocess.run([binary, *args], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_probe_tells_the_daemons_states_apart(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon:
        admin = admin_of(daemon)
        listen = f"--listen={daemon.grpc}"
        for asked in ([], ["liveness"], ["models/sample"]):
            assert probe(*asked, listen) == (0, "")
        admin("drain")
        assert probe(listen) == (1, f"epikv-probe: {daemon.grpc} is NOT_SERVING\n")
        assert probe("models/sample", listen)[0] == 1
        assert probe("liveness", listen) == (0, "")
        admin("resume")
        assert probe(listen) == (0, "")
    status, output = probe("liveness", listen)
    assert status == 1 and "Connection refused" in output


def test_probe_reads_what_the_daemon_reads(sample_model: Path, tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    signed(tmp_path, "server", "ca")
    settings = tmp_path / "epikvd.textproto"
    settings.write_text(
        f'tls_certificate: "{tmp_path}/server.pem"\n'
        f'tls_key: "{tmp_path}/server.key"\n'
        f'tls_client_ca: "{tmp_path}/ca.pem"\n'
    )
    tls = Tls(*(tmp_path / name for name in ("ca.pem", "server.pem", "server.key")))
    config = f"--config={settings}"
    with Daemon(sample_model, "--threads=1", config, tls=tls) as daemon:
        listen = f"--listen={daemon.grpc}"
        assert probe(config, listen) == (0, "")
        assert probe(listen)[0] == 1  # in plain text
    settings.write_text("listne: 'here'\n")
    status, output = probe(config, "--listen=here")
    assert status == 1
    assert f"{settings}:1: " in output and "--listen must be host:port" in output


def test_probe_explains_itself() -> None:
    status, output = probe("--help")
    assert status == 0 and "liveness" in output
