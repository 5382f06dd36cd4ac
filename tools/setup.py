"""Generates epikv.v1 from ../proto before the package is built or installed in place."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).resolve().parent
PROTO = PACKAGE.parent / "proto"


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


setup(cmdclass={"build_py": BuildWithProtos})
