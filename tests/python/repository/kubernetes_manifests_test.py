"""deploy/kubernetes: kubectl builds it, the published schemas take it, and it agrees with the daemon, the images and the
page. No cluster is asked; tests/e2e/operating/kubernetes_pod_test.py runs the pod."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from epikv.cli import main
from kustomized import KUBERNETES, ROOT, Object, build, container, containers, one, tool

# From the oldest that has sidecars to the newest whose schemas are at hand.
VERSIONS = ("1.29", "1.37")
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
BUILT = [KUBERNETES / "base", *OVERLAYS, KUBERNETES / "kserve"]
SERVICE = KUBERNETES / "kserve" / "inferenceservice.yaml"
# Of the Gateway API's extension no schema comes with a package at hand.
NO_SCHEMA = {"InferencePool/epikvd"}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = {"epikvd": "runtime", "epikv-gateway": "gateway"}
# After drain_seconds the daemon ends by force (docs/runbook.md, "EpikvdEngineHangs").
FORCED_SECONDS = 25


def name_of(folder: Path) -> str:
    return folder.relative_to(KUBERNETES).as_posix()


def stateful(folder: Path) -> Object:
    return one(build(folder), "StatefulSet", "epikvd")


def pod_of(folder: Path) -> Object:
    return dict(stateful(folder)["spec"]["template"]["spec"])


def pods() -> list[tuple[str, Object]]:
    """Every pod's spec, and where it is from."""
    found = [
        (f"{name_of(folder)}: {each['metadata']['name']}", each["spec"]["template"]["spec"])
        for folder in BUILT
        for each in build(folder)
        if each["kind"] in ("StatefulSet", "Deployment")
    ]
    runtime = one(build(KUBERNETES / "kserve"), "ClusterServingRuntime", "epikv")
    return [*found, ("kserve", runtime["spec"])]


def check(objects: list[Object], *options: str) -> list[Object]:
    """Of each object what tests/kubernetes/check.py finds wrong with it."""
    done = subprocess.run(
        [tool("python"), ROOT / "tests" / "kubernetes" / "check.py", *options],
        input=yaml.dump_all(objects, Dumper=yaml.CSafeDumper),
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def everything() -> list[Object]:
    """Each object once."""
    objects = [each for folder in BUILT for each in build(folder)]
    objects.append(yaml.safe_load(SERVICE.read_text()))
    different = {json.dumps(each, sort_keys=True): each for each in objects}
    return list(different.values())


# Building.


@pytest.mark.parametrize("folder", BUILT, ids=name_of)
def test_kubectl_builds_it_without_a_warning(folder: Path) -> None:
    assert len(build(folder)) >= 1


def test_every_file_is_used() -> None:
    """By a kustomization; kserve/inferenceservice.yaml is an example, which the page names."""
    used = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        used.add(path)
        named = re.findall(r"[\w./-]+\.(?:yaml|sh|textproto)\b", path.read_text())
        used |= {(path.parent / name).resolve() for name in named}
    components = {path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml")}
    overlays = "".join((folder / "kustomization.yaml").read_text() for folder in OVERLAYS)
    assert components == set(re.findall(r"components/([\w-]+)", overlays))
    assert {path for path in KUBERNETES.rglob("*") if path.is_file()} - used == {SERVICE}
    assert "kserve/inferenceservice.yaml" in PAGE


# Schemas.


def set_at(node: Any, path: str, value: object) -> None:
    *before, last = path.split(".")
    for key in before:
        node = node[int(key)] if key.isdigit() else node[key]
    node[last] = value


WRONG = [
    ("StatefulSet", "spec.template.spec.containers.0.readinessProbe.periodSecond", 5),
    ("StatefulSet", "spec.replicas", "two"),
    ("NetworkPolicy", "spec.policyTypes", "Ingress"),
    ("PodDisruptionBudget", "spec.maxUnavailable", {}),
    ("ScaledObject", "spec.maxReplicas", 8),
    ("ScaledObject", "spec.minReplicaCount", "two"),
    ("ServiceMonitor", "spec.endpoints.0.intervall", "15s"),
    ("PrometheusRule", "spec.groups.0.rules.0.expression", "up == 0"),
    ("ClusterServingRuntime", "spec.containers.0.arguments", []),
    ("InferenceService", "spec.predictor.model.storageURI", "s3://models"),
]


def broken() -> list[Object]:
    """In the order of WRONG."""
    found = []
    for kind, path, value in WRONG:
        object_ = copy.deepcopy(next(each for each in everything() if each["kind"] == kind))
        set_at(object_, path, value)
        object_["metadata"]["name"] = f"wrong-{len(found)}"
        found.append(object_)
    return found


@pytest.fixture(scope="module")
def checked() -> dict[bool, list[Object]]:
    """Of what is broken, and of what is shipped."""
    found = check([*everything(), *broken()], "--kubernetes", *VERSIONS)
    of: dict[bool, list[Object]] = {True: [], False: []}
    for each in found:
        of["/wrong-" in each["object"]].append(each)
    return of


def test_the_published_schemas_take_every_object(checked: dict[bool, list[Object]]) -> None:
    found = checked[False]
    assert [each for each in found if each["wrong"]] == []
    assert {each["object"] for each in found if each["by"] is None} == NO_SCHEMA
    assert {each["by"].split()[0] for each in found if each["by"]} == {
        "Kubernetes",
        "cloudcoil.models.keda",
        "cloudcoil.models.prometheus_operator",
        "kserve",
    }
    versions = {each["by"] for each in found if each["object"] == "StatefulSet/epikvd"}
    assert versions == {f"Kubernetes {version}" for version in VERSIONS}


def test_what_a_schema_does_not_take_is_found(checked: dict[bool, list[Object]]) -> None:
    for at, (kind, path, _) in enumerate(WRONG):
        found = [each for each in checked[True] if each["object"] == f"{kind}/wrong-{at}"]
        assert found
        for each in found:
            assert path.rpartition(".")[2] in "".join(each["wrong"]), (path, each)


@pytest.mark.skipif(
    "EPIKV_CRDS" not in os.environ,
    reason="EPIKV_CRDS names no folder of CustomResourceDefinitions, in YAML, of those that extend Kubernetes",
)
def test_the_definitions_of_those_that_extend_kubernetes_take_every_object() -> None:
    found = check(everything(), "--crds", os.environ["EPIKV_CRDS"])
    assert [each for each in found if each["wrong"]] == []
    assert {each["object"] for each in found if each["by"] == "CRD"} >= NO_SCHEMA


# What a pod may.


@pytest.mark.parametrize(("where", "spec"), pods(), ids=[where for where, _ in pods()])
def test_pods_are_restricted(where: str, spec: Object) -> None:
    """As Pod Security's `restricted` asks; and the root is read-only."""
    shared = spec.get("securityContext", {})
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for each in containers(spec):
        security = shared | each["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["allowPrivilegeEscalation"] is False and "privileged" not in security
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in each.get("ports", []))
        assert {"requests", "limits"} <= each["resources"].keys()
        assert "memory" in each["resources"]["limits"], "what is not limited takes a node down"
    kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "secret", "emptyDir"}


def test_the_user_is_the_images() -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert len(user) == 2 and len(set(user)) == 1
    security = pod_of(KUBERNETES / "base")["securityContext"]
    assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user[0]
    runtime = one(build(KUBERNETES / "kserve"), "ClusterServingRuntime", "epikv")
    assert (
        str(container(runtime["spec"], "kserve-container")["securityContext"]["runAsUser"])
        == user[0][0]
    )


# What fits what.


def seconds(text: str, setting: str) -> float:
    found = re.search(rf"^{setting}: ([\d.]+)", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_the_grace_is_above_the_drain() -> None:
    base = (KUBERNETES / "base" / "epikvd.textproto").read_text()
    default = (ROOT / "deploy" / "epikvd.textproto").read_text()
    predictor = yaml.safe_load(SERVICE.read_text())["spec"]["predictor"]
    runtime = one(build(KUBERNETES / "kserve"), "ClusterServingRuntime", "epikv")["spec"]
    stop = f"up to {FORCED_SECONDS} s"
    for grace, of, text in (
        *((pod_of(folder), container(pod_of(folder), "epikvd"), base) for folder in BUILT[:-1]),
        (predictor, container(runtime, "kserve-container"), default),
    ):
        command, before = of["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        least = float(before) + seconds(text, "drain_seconds") + FORCED_SECONDS
        assert grace["terminationGracePeriodSeconds"] > least, stop


def test_images_are_stages_of_the_dockerfile() -> None:
    spec = pod_of(KUBERNETES / "base")
    for name, image in (("epikvd", "epikvd"), ("gateway", "epikv-gateway")):
        assert container(spec, name)["image"] == image
        assert f" AS {STAGES[image]}\n" in DOCKERFILE
        assert "command" not in container(spec, name), "the image's entry point"
    for folder in OVERLAYS:
        images = {each["image"] for each in containers(pod_of(folder))}
        version = re.search(r'image.version="([^"]+)"', DOCKERFILE)
        assert version is not None
        ours = {f"registry.example/{image}:{version[1]}" for image in STAGES}
        assert ours <= images and all(re.search(r":v?\d+\.\d+\.\d+$", each) for each in images)


def test_ports_are_those_that_are_listened_on() -> None:
    settings = (KUBERNETES / "base" / "epikvd.textproto").read_text()
    listens = dict(re.findall(r'^(\w+): "0\.0\.0\.0:(\d+)"', settings, re.MULTILINE))
    assert set(listens) == {"listen", "metrics_listen"}, "the port for operators is on loopback"
    pod = pod_of(KUBERNETES / "base")
    ports = {
        port["name"]: str(port["containerPort"])
        for each in containers(pod)
        for port in each.get("ports", [])
    }
    gateway = re.search(r'"--listen=0\.0\.0\.0:(\d+)"', DOCKERFILE)
    assert gateway is not None
    wanted = {"grpc": listens["listen"], "metrics": listens["metrics_listen"], "http": gateway[1]}
    assert ports == wanted
    environment = container(pod, "gateway")["env"]
    assert environment == [{"name": "EPIKV_SERVER", "value": f"127.0.0.1:{ports['grpc']}"}]
    probes = container(pod, "epikvd")
    for name in ("readinessProbe", "livenessProbe"):
        assert str(probes[name]["grpc"]["port"]) == ports["grpc"]
    assert probes["livenessProbe"]["grpc"]["service"] == "liveness"

    objects = build(KUBERNETES / "overlays" / "inference-pool")
    for service in ("epikvd", "epikvd-replicas"):
        for each in one(objects, "Service", service)["spec"]["ports"]:
            assert str(each["port"]) == ports[each["targetPort"]]
    for rule in one(objects, "NetworkPolicy", "epikvd")["spec"]["ingress"]:
        assert {each["port"] for each in rule["ports"]} <= set(ports)
    pool = one(objects, "InferencePool", "epikvd")["spec"]
    assert pool["targetPorts"] == [{"number": int(ports["http"])}]
    picker = one(objects, "Service", pool["endpointPickerRef"]["name"])["spec"]
    numbers = {each["port"] for each in picker["ports"]}
    assert pool["endpointPickerRef"]["port"]["number"] in numbers
    config = yaml.safe_load(
        (KUBERNETES / "components/inference-pool/picker-config.yaml").read_text()
    )
    [source] = [each for each in config["plugins"] if each["type"] == "metrics-data-source"]
    assert str(source["parameters"]["port"]) == ports["metrics"]


@pytest.mark.parametrize("folder", [KUBERNETES / "base", *OVERLAYS], ids=name_of)
def test_selectors_find_the_pods(folder: Path) -> None:
    objects = build(folder)
    owner = one(objects, "StatefulSet", "epikvd")["spec"]
    labels = owner["template"]["metadata"]["labels"].items()
    assert owner["selector"]["matchLabels"].items() <= labels
    assert one(objects, "Service", owner["serviceName"])["spec"]["clusterIP"] == "None"
    for kind, name, path in (
        ("Service", "epikvd", ("selector",)),
        ("Service", "epikvd-replicas", ("selector",)),
        ("PodDisruptionBudget", "epikvd", ("selector", "matchLabels")),
        ("NetworkPolicy", "epikvd", ("podSelector", "matchLabels")),
        ("InferencePool", "epikvd", ("selector", "matchLabels")),
    ):
        for each in objects:
            if (each["kind"], each["metadata"]["name"]) == (kind, name):
                found = each["spec"]
                for key in path:
                    found = found[key]
                assert found.items() <= labels, name
    for each in objects:
        if each["kind"] == "ServiceMonitor":
            selected = each["spec"]["selector"]["matchLabels"].items()
            services = [of for of in objects if of["kind"] == "Service"]
            [found] = [of for of in services if selected <= of["metadata"]["labels"].items()]
            ports = {port["name"] for port in found["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in each["spec"]["endpoints"]} <= ports
        if each["kind"] == "ScaledObject":
            target = each["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) == ("StatefulSet", "epikvd")
            assert "replicas" not in owner, "applying them again would undo what KEDA decided"
            assert each["metadata"]["namespace"] == "epikv"
            queries = [of["metadata"]["query"] for of in each["spec"]["triggers"]]
            assert all('namespace="epikv"' in query for query in queries)


@pytest.mark.parametrize(("where", "spec"), pods(), ids=[where for where, _ in pods()])
def test_what_is_mounted_is_a_volume_and_the_page_says_what_is_to_be_made(
    where: str, spec: Object
) -> None:
    claims = {"models", "spool"} if where.endswith(": epikvd") else set()
    volumes = {each["name"] for each in spec["volumes"]} | claims
    mounted = {mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", [])}
    assert mounted == volumes
    secrets = {each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
    for secret in secrets:
        assert f"`{secret}`" in PAGE, secret


def test_claims_are_those_of_the_pod() -> None:
    for folder in BUILT[:-1]:
        claims = stateful(folder)["spec"]["volumeClaimTemplates"]
        assert [each["metadata"]["name"] for each in claims] == ["models", "spool"]


def test_flags_and_settings_are_there() -> None:
    defaults = (ROOT / "deploy" / "epikvd.textproto").read_text()
    settings = set(re.findall(r"^(\w+): ", defaults, re.MULTILINE))
    text = (KUBERNETES / "base" / "epikvd.textproto").read_text()
    assert set(re.findall(r"^(\w+): ", text, re.MULTILINE)) <= settings
    gateway = CliRunner().invoke(main, ["gateway", "--help"]).output
    for where, spec in pods():
        for each in containers(spec):
            flags = [flag.partition("=")[0] for flag in each.get("args", [])]
            if each["name"] in ("epikvd", "kserve-container"):
                assert {flag.removeprefix("--") for flag in flags} <= settings, where
            elif each["name"] == "gateway":
                assert all(f"{flag} " in gateway for flag in flags), where


def test_the_alerts_are_those_of_prometheus() -> None:
    rules = one(build(KUBERNETES / "overlays" / "production"), "PrometheusRule", "epikvd")
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert rules["spec"] == alerts, "the head of prometheusrule.yaml says how it is written anew"


def test_the_page_names_every_part() -> None:
    for path in sorted(KUBERNETES.glob("*/*/kustomization.yaml")):
        assert f"`{name_of(path.parent)}`" in PAGE, path
    assert "## What was not run" in PAGE
