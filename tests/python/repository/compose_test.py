"""deploy/compose.yaml fits the images, their settings and what Prometheus scrapes. It runs where there is a
container engine; here is what can be held together without one."""

import re
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from epikv.cli import main

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]


def stage(name: str) -> str:
    """Of the Dockerfile, up to the next one."""
    return re.split(rf"^FROM \S+ AS {name}$", DOCKERFILE, flags=re.MULTILINE)[1].split("\nFROM ")[0]


def test_its_images_are_stages_of_the_dockerfile() -> None:
    for name, target in (("epikvd", "runtime"), ("gateway", "gateway")):
        build = SERVICES[name]["build"]
        assert (ROOT / "deploy" / build["context"] / "Dockerfile").exists()
        assert build["target"] == target and "ENTRYPOINT" in stage(target)
    assert DOCKERFILE.rstrip().endswith(stage("runtime").rstrip()), "what is built without a target"


def test_who_reaches_whom_by_which_port() -> None:
    daemon, gateway = stage("runtime"), stage("gateway")
    assert "EXPOSE 50051/tcp 9464/tcp" in daemon and "EXPOSE 8000/tcp" in gateway
    assert '"--listen=0.0.0.0:8000"' in gateway
    assert SERVICES["gateway"]["environment"] == {"EPIKV_SERVER": "epikvd:50051"}
    assert SERVICES["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    settings = (ROOT / "deploy/container.textproto").read_text()
    assert 'listen: "0.0.0.0:50051"' in settings and 'metrics_listen: "0.0.0.0:9464"' in settings
    config = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    jobs = config["scrape_configs"]
    targets = [each for job in jobs for of in job["static_configs"] for each in of["targets"]]
    assert targets == ["epikvd:9464", "gateway:8000"]
    assert all((ROOT / "deploy/prometheus" / name).exists() for name in config["rule_files"])
    assert "ports" not in SERVICES["epikvd"], "it asks nobody for a token"


def test_containers_may_drain() -> None:
    help_ = CliRunner().invoke(main, ["gateway", "--help"], terminal_width=200).output
    drains = re.search(r"--drain-seconds.*?\[default: (\d+)", help_, re.DOTALL)
    assert drains is not None
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > int(drains[1])
    defaults = (ROOT / "deploy/epikvd.textproto").read_text()
    drain = re.search(r"^drain_seconds: ([\d.]+)", defaults, re.MULTILINE)
    assert drain is not None
    assert int(SERVICES["epikvd"]["stop_grace_period"].removesuffix("s")) > float(drain[1])
