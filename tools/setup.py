"""Generates epikv.v1 from ../proto before the package is built or installed in place, in the version of
../CMakeLists.txt. With programs in epikv/bin it makes a wheel for this platform."""

import re
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).resolve().parent
PROTO = PACKAGE.parent / "proto"
# deploy/wheel.sh has put the programs there.
BRINGS_DAEMON = (PACKAGE / "epikv" / "bin" / "epikvd").exists()
VERSION = re.compile(r"^project\(epikv VERSION (\S+)", re.MULTILINE)


class BuildWithProtos(build_py):
    def run(self) -> None:
        from grpc_tools import protoc

        sources = sorted(str(path) for path in PROTO.glob("epikv/v1/*.proto"))
        if not sources:
            raise SystemExit(
                f"no .proto files in {PROTO}; install from a checkout of the repository"
            )
        outputs = [f"--{kind}_out={PACKAGE}" for kind in ("python", "pyi", "grpc_python")]
        well_known = Path(protoc.__file__).parent / "_proto"
        if protoc.main(["protoc", f"-I{PROTO}", f"-I{well_known}", *outputs, *sources]):
            raise SystemExit("protoc failed")
        super().run()


def version() -> str:
    listing = PACKAGE.parent / "CMakeLists.txt"
    found = VERSION.search(listing.read_text())
    if found is None:
        raise SystemExit(f"no version in {listing}")
    return found[1]


class WithPrograms(Distribution):
    """With the daemon in it, the package is one of this platform, and goes where such packages go."""

    def has_ext_modules(self) -> bool:
        return BRINGS_DAEMON


class PlatformWheel(bdist_wheel):
    """Of any Python: the programs do not link it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    version=version(),
    distclass=WithPrograms,
    cmdclass={"build_py": BuildWithProtos, "bdist_wheel": PlatformWheel},
)
