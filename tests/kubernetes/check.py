"""Validates Kubernetes objects strictly: what a schema does not name is an error, as in the API server's strict
validation. No cluster is asked. Run in the environment that install.sh makes:

    build/kubernetes/bin/python tests/kubernetes/check.py [--kubernetes 1.37 ...] [--crds FOLDER] < objects.yaml

Prints JSON: of each object its name, where its schema is from (null: there is none) and what is wrong with it.
Kubernetes' own objects go by its published schemas (kubernetes-validate). Of others' it knows KEDA's and the Prometheus
operator's, from models made of their CRDs (cloudcoil); KServe's, from its SDK; and those of a folder of CRDs in YAML,
which go before. Rules in CEL (x-kubernetes-validations) are not evaluated.
"""

import argparse
import json
import re
import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]
CLOUDCOIL = {
    ("keda.sh/v1alpha1", "ScaledObject"): ("cloudcoil.models.keda", "v1alpha1"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): ("cloudcoil.models.prometheus_operator", "v1"),
    ("monitoring.coreos.com/v1", "PrometheusRule"): ("cloudcoil.models.prometheus_operator", "v1"),
}
KSERVE = {
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "V1alpha1ClusterServingRuntime",
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
}
# Types in KServe's SDK that are no models of its own.
BUILTIN: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "object": {},
    "ResourceQuantity": {"type": ["string", "number"]},
}


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


def strict(node: Any) -> Any:
    """The schema, with what it does not name forbidden."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    schema = {name: strict(each) for name, each in node.items()}
    closes = isinstance(node.get("properties"), dict)
    if closes and not node.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


@cache
def definitions(version: str) -> Schema:
    schemas = folder_of("kubernetes_validate") / "kubernetes-json-schema"
    text = (schemas / f"v{version}.0-local-strict" / "_definitions.json").read_text()
    return dict(json.loads(text)["$defs"])


@cache
def of_kubernetes(version: str, api: str, kind: str) -> Schema | None:
    schemas = folder_of("kubernetes_validate") / "kubernetes-json-schema"
    name = "-".join(filter(None, [kind.lower(), *re.sub(r"\.[\w.]*/", "/", api).split("/")]))
    path = schemas / f"v{version}.0-local-strict" / f"{name}.json"
    if not path.exists():
        return None
    schema = json.loads(re.sub(r'"/api/[^#"]*#', '"#', path.read_text()))
    return {**schema, "$id": "", "$defs": definitions(version)}


@cache
def of_cloudcoil(api: str, kind: str) -> Schema | None:
    if (api, kind) not in CLOUDCOIL:
        return None
    package, module = CLOUDCOIL[api, kind]
    model = getattr(import_module(f"{package}.{module}"), kind)
    return dict(strict(model.model_json_schema(by_alias=True)))


@cache
def kserve_models() -> ModuleType:
    """Of its SDK, without its server."""
    package = ModuleType("kserve")
    package.__path__ = [str(folder_of("kserve"))]
    configuration = ModuleType("kserve.configuration")
    configuration.Configuration = object  # type: ignore[attr-defined]
    sys.modules |= {"kserve": package, "kserve.configuration": configuration}
    return import_module("kserve.models")


def of_kserve(version: str, api: str, kind: str) -> Schema | None:
    """From the SDK's models, which say of each field its name and type."""
    if (api, kind) not in KSERVE:
        return None
    models = kserve_models()
    known = dict(definitions(version))

    def of(type_: str) -> Schema:
        if type_.startswith("list["):
            return {"type": "array", "items": of(type_[5:-1])}
        if type_.startswith("dict("):
            return {"type": "object", "additionalProperties": of(type_[5:-1].split(", ", 1)[1])}
        if type_ in BUILTIN:
            return BUILTIN[type_]
        if (model := getattr(models, type_, None)) is not None:
            if type_ not in known:
                known[type_] = {}  # it may name itself
                fields = {model.attribute_map[field]: of(of_) for field, of_ in types(model)}
                known[type_] = {"properties": fields, "additionalProperties": False}
            return {"$ref": f"#/$defs/{type_}"}
        name = f"io.k8s.api.core.v1.{type_.removeprefix('V1')}"
        return {"$ref": f"#/$defs/{name}"} if name in known else {"type": "object"}

    def types(model: Any) -> list[tuple[str, str]]:
        return list(model.openapi_types.items())

    return {**of(KSERVE[api, kind]), "$defs": known}


def of_crds(folder: Path) -> dict[tuple[str, str], Schema]:
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for crd in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            for version in crd["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                api = f"{crd['spec']['group']}/{version['name']}"
                found[api, crd["spec"]["names"]["kind"]] = schema
    return found


def schema_of(
    version: str, crds: dict[tuple[str, str], Schema], api: str, kind: str
) -> tuple[str | None, Schema]:
    if (api, kind) in crds:
        return "CRD", crds[api, kind]
    if found := of_kubernetes(version, api, kind):
        return f"Kubernetes {version}", found
    if found := of_cloudcoil(api, kind):
        package = CLOUDCOIL[api, kind][0]
        return f"{package} {metadata.version(package)}", found
    if found := of_kserve(version, api, kind):
        return f"kserve {metadata.version('kserve')}", found
    return None, {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Validates objects on stdin.")
    parser.add_argument("--kubernetes", nargs="+", default=["1.37"])
    parser.add_argument("--crds", type=Path)
    given = parser.parse_args()
    crds = of_crds(given.crds) if given.crds else {}
    found = []
    for each in filter(None, yaml.load_all(sys.stdin, yaml.CSafeLoader)):
        schemas = dict(
            schema_of(version, crds, each["apiVersion"], each["kind"])
            for version in given.kubernetes
        )
        for by, schema in schemas.items():
            errors = Draft202012Validator(schema).iter_errors(each)
            wrong = [f"{error.json_path}: {error.message}" for error in errors]
            name = f"{each['kind']}/{each['metadata']['name']}"
            found.append({"object": name, "by": by, "wrong": wrong})
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
