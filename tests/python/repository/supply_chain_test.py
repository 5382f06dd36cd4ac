"""What the repository fetches has a hash: in the files of tools/requirements, in each command that installs, and in
what npm is given."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "tools" / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.txt"))
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
PIN = re.compile(r"([\w.-]+)==(\S+)")
PROJECT = tomllib.loads((ROOT / "tools/pyproject.toml").read_text())
# By Python, in environments of their own, of versions alone: other engines, measured beside this one.
OF_PEERS = "tools/lab/epikv_lab/bench/peers/venvs.py"
# Checks the digest of what it fetches: tests/e2e/operating/kubernetes_pod_test.py.
CHECKS = "deploy/kubernetes/base/fetch_model.sh"
# Tells users what to type.
TELLS = "tools/epikv/installing.py"


def joined(text: str) -> list[str]:
    """Lines, with those that go on in the next one made whole, and no comments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def unpinned(text: str) -> list[str]:
    """Requirements of a file that do not name one version and a hash."""
    return [
        line
        for line in filter(str.strip, joined(text))
        if not (PIN.match(line) and HASH.search(line)) or HASH.sub("", line).split()[1:]
    ]


def pins(path: Path) -> dict[str, str]:
    found = [PIN.match(line) for line in joined(path.read_text())]
    return {canonicalize_name(pin[1]): pin[2] for pin in found if pin}


def unchecked(text: str) -> list[str]:
    """Commands of a script or a block that fetch what no hash names."""
    commands = [
        command.strip()
        for line in joined(text)
        for command in re.split(r"&&|\|\||;|\$\(", re.sub(r"\s#.*", "", line))
    ]
    return [command for command in commands if fetches_unchecked(command)]


def fetches_unchecked(command: str) -> bool:
    if re.search(r"\bpip\d?\b[\"']?( -\S+)* (install|download|wheel)\b", command):
        return "--require-hashes" not in command and "--no-index" not in command
    if re.search(r"\bnpm\b.* (install|i|add|exec|update)\b|\bnpx\b", command):
        return True
    if re.search(r"-m build\b", command):
        return "--no-isolation" not in command
    return (
        re.search(r"(^|\s)(curl|wget|git clone|git fetch|easy_install|pipx|go get)\b", command)
        is not None
    )


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_has_a_hash(path: Path) -> None:
    assert pins(path) and unpinned(path.read_text()) == []


def test_a_requirement_without_a_hash_is_found() -> None:
    sha = f"--hash=sha256:{'0' * 64}"
    assert unpinned(f"# a==1\na==1 \\\n    {sha} \\\n    {sha}\n") == []
    for line in ("a==1", f"a {sha}", f"a>=1 {sha}", "a==1 --hash=sha256:0", f"a==1 {sha} -e b"):
        assert unpinned(line) == [line]
    assert unpinned("--index-url https://elsewhere") != []


def test_a_package_has_one_version() -> None:
    """But for clients of others that tests ask with, in an environment of their own."""
    versions: dict[str, set[str]] = {}
    for path in LOCKS:
        if path.name == "clients.txt":
            continue
        for name, version in pins(path).items():
            versions.setdefault(name, set()).add(version.partition("+")[0])
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_the_set_up_has_what_the_package_requires() -> None:
    """In versions that it takes; what these require, pip finds in the file or refuses it."""
    locked = pins(REQUIREMENTS / "tools.txt") | pins(REQUIREMENTS / "torch-cuda.txt")
    locked |= {"ray": pins(REQUIREMENTS / "ray.txt")["ray"]}  # in an environment of its own
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"], *extras]
    for requirement in (Requirement(line) for lines in wanted for line in lines):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, and {version} is locked"
    assert pins(REQUIREMENTS / "torch-cpu.txt")["torch"] == f"{locked['torch']}+cpu"


def test_the_other_package_is_built_by_the_same() -> None:
    lab = tomllib.loads((ROOT / "tools/lab/pyproject.toml").read_text())
    assert set(lab["build-system"]["requires"]) <= set(PROJECT["build-system"]["requires"])


def test_every_command_that_installs_checks_hashes() -> None:
    scripts = [
        path for path in TRACKED if path.suffix == ".sh" or path.name in ("Dockerfile", "run")
    ]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in scripts}
    assert {"Dockerfile", "deploy/setup.sh", "deploy/wheel.sh", "tests/run.sh"} <= texts.keys()
    seen = "\n".join(texts.values())
    assert seen.count("--require-hashes") >= 5 and seen.count("npm --prefix") == 2
    del texts[CHECKS]
    found = {name: unchecked(text) for name, text in texts.items()}
    assert {name: commands for name, commands in found.items() if commands} == {}


def test_every_command_that_a_page_shows_checks_hashes() -> None:
    found = {}
    for path in TRACKED:
        if path.suffix == ".md":
            blocks = re.findall(
                r"^```(?:bash|sh)?\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
            )
            if commands := [each for block in blocks for each in unchecked(block)]:
                found[str(path.relative_to(ROOT))] = commands
    assert found == {}


def test_no_build_file_fetches() -> None:
    pattern = re.compile(r"FetchContent|ExternalProject|file\s*\(\s*DOWNLOAD|git clone")
    builds = [path for path in TRACKED if path.name == "CMakeLists.txt" or path.suffix == ".cmake"]
    assert len(builds) > 5
    assert [str(path) for path in builds if pattern.search(path.read_text())] == []


def test_python_runs_pip_for_peers_alone() -> None:
    """Those are compared with the daemon and shipped with nothing."""
    runs = {
        str(path.relative_to(ROOT))
        for path in TRACKED
        if path.suffix == ".py" and path.is_relative_to(ROOT / "tools")
        if re.search(r"[\"']pip[\"']|\bpip (install|download)\b", path.read_text())
    }
    assert runs == {OF_PEERS, TELLS}


@pytest.mark.parametrize(
    "command",
    [
        "pip install torch",
        "x && .venv/bin/pip install -c constraints.txt torch || y",
        '"$builder/bin/pip" --disable-pip-version-check install -r a.txt',
        "python3 -m pip download \\\n  --no-deps x",
        "stage LibTorch pip install --no-deps torch==2",
        "python -m build --wheel .",
        "npm --prefix tests/wire install",
        "npx buf lint",
        "curl -O https://elsewhere/a.whl",
    ],
)
def test_a_command_that_checks_no_hash_is_found(command: str) -> None:
    assert len(unchecked(f"# a comment\n{command}\n")) == 1


def test_npm_has_a_hash_for_every_package() -> None:
    locks = [path for path in TRACKED if path.name == "package-lock.json"]
    assert len(locks) == 3
    for path in locks:
        packages = json.loads(path.read_text())["packages"]
        del packages[""]  # the project itself
        assert packages
        assert [name for name, each in packages.items() if "sha512-" not in each["integrity"]] == []
