"""Writes the software bill of materials of the image, CycloneDX in JSON. The Dockerfile runs it, where the daemon
was built; the environment is of tools/requirements/sbom.txt.

debsbom names Debian's packages of the image. To these come the daemon, with what is compiled into it and the files
of torch's wheel that lie beside it, both as NOTICE names them; and of which packages the daemon links libraries.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from linked import installed, libraries, of_torch, owners
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
# Headers come from these packages of the system that the daemon was built on.
HEADERS = {
    "nlohmann_json": "nlohmann-json3-dev",
    "Boost": "libboost1.81-dev",
    "Random123": "librandom123-dev",
    "hwy": "libhwy-dev",
}


def notice(title: str) -> list[list[str]]:
    """The rows below a line that begins so: name, version, licence, use."""
    text = (ROOT / "NOTICE").read_text()
    section = text[text.index(f"\n{title}") :].split("\n\n")[1]
    return [re.split(" {2,}", line.strip()) for line in section.splitlines()]


def component(row: list[str], version: str | None = None, **more: object) -> Component:
    name, told, licence, use = row
    inside = told.startswith("of ")  # it has no version of its own
    licences = [LicenseFactory().make_from_string(licence)]
    version = None if inside else version or told
    return Component(
        name=name, version=version, licenses=licences, description=use, bom_ref=name, **more
    )


def sha256(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def only(pattern: str, text: str) -> str:
    [found] = re.findall(pattern, text, re.MULTILINE)
    return found


def compiled_in() -> list[Component]:
    """What the daemon has in itself; of xgrammar, with what is in that."""
    lock = (ROOT / "tools/requirements/xgrammar.txt").read_text()
    here = installed()
    found: dict[str, Component] = {}
    for row in notice("Compiled into epikvd"):
        name, version = row[:2]
        if version.startswith("of "):
            found[version.removeprefix("of ")].components.add(component(row))
        elif name == "xgrammar":
            assert only(r"^xgrammar==(\S+)", lock) == version, "NOTICE has another xgrammar"
            purl = PackageURL("pypi", None, name, version)
            hashes = sha256(only(r"sha256:(\w+)", lock))
            found[name] = component(row, purl=purl, hashes=hashes)
        else:
            package = here[HEADERS[name]]
            about = {"arch": package.architecture}
            purl = PackageURL("deb", "debian", package.name, package.version, about)
            found[name] = component(row, package.version, purl=purl)
    return list(found.values())


def torch(report: Path) -> Component:
    """Of the wheel that pip installed, as it reported."""
    [installed_wheel] = json.loads(report.read_text())["install"]
    version = installed_wheel["metadata"]["version"]
    algorithm, _, digest = installed_wheel["download_info"]["archive_info"]["hash"].partition("=")
    assert algorithm == "sha256"
    row, *inside = notice("Linked by epikvd from PyTorch's wheel")
    purl = PackageURL("pypi", None, "torch", version)
    found = component(row, version, purl=purl, hashes=sha256(digest))
    found.components.update(component(each) for each in inside)
    return found


def debian(root: Path) -> Bom:
    """Of all packages of the system below root."""
    command = [str(Path(sys.executable).with_name("debsbom")), "generate", "--sbom-type", "cdx"]
    command += ["--root", str(root), "--out", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Bom.from_json(json.loads(done.stdout))


def linked_packages(program: Path, root: Path, bom: Bom) -> list[Component]:
    """Debian's packages that have the libraries which the program links; torch has the others."""
    of_debian = [path for path in libraries(program).values() if not of_torch(path)]
    known = owners(of_debian, root)
    unknown = [str(path) for path in of_debian if path not in known]
    assert not unknown, f"no package of the image has {', '.join(unknown)}"
    by_name = {
        each.name: each
        for each in bom.components
        if each.purl is not None and each.purl.qualifiers.get("arch") != "source"
    }
    return [by_name[name] for name in sorted(set(known.values()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the image's system")
    parser.add_argument("--program", type=Path, required=True, help="epikvd, where it was linked")
    parser.add_argument("--torch", type=Path, required=True, help="pip's report of its wheel")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()

    bom = debian(given.root)
    system = bom.metadata.component
    version = only(r"^project\(epikv VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    licences = [LicenseFactory().make_from_string("Apache-2.0")]
    daemon = Component(
        name="epikvd",
        version=version,
        type=ComponentType.APPLICATION,
        bom_ref="epikvd",
        licenses=licences,
        purl=PackageURL("generic", None, "epikvd", version),
        properties=[Property(name="commit", value=given.commit)],
    )
    image = Component(name="epikvd", version=version, type=ComponentType.CONTAINER, bom_ref="image")
    wheel = torch(given.torch)
    inside = compiled_in()
    linked = linked_packages(given.program, given.root, bom)
    bom.components.update([system, daemon, wheel, *inside])
    bom.metadata.component = image
    bom.register_dependency(image, [system, daemon])
    bom.register_dependency(daemon, [wheel, *inside, *linked])

    text = JsonV1Dot6(bom).output_as_string(indent=1)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise SystemExit(f"the bill does not obey CycloneDX's schema: {wrong}")
    given.out.write_text(text + "\n")
    print(f"{len(bom.components)} components, {len(linked)} of Debian's packages linked")


if __name__ == "__main__":
    main()
