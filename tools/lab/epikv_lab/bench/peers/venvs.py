"""Where peers live: virtual environments and a build of their own, in pinned versions.

A folder's name tells its pins, so that other pins are installed anew. None is a dependency of epikv.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from epikv import harness

TORCH = "torch==2.13.0"
LLAMA = "0.3.36"  # of llama-cpp-python

# By virtual environment and peer; all of one environment are installed beside its first.
PINS: Mapping[str, Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "peers": {
            "transformers": ("transformers==5.23.0", "tokenizers==0.23.3", "safetensors==0.8.0"),
            "openvino": (
                "openvino==2026.4.1",
                "openvino-tokenizers==2026.4.1.0",
                "openvino-genai==2026.4.1.0",
            ),
            "ctranslate2": ("ctranslate2==4.8.5",),
            "onnxruntime": ("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
            "llama": ("numpy==2.4.6", "diskcache==5.6.3", "jinja2==3.1.6", "sentencepiece==0.2.3"),
        },
        "export": {  # optimum wants an older transformers
            "openvino": (
                "optimum-intel==2.2.0",
                "openvino==2026.4.1",
                "openvino-tokenizers==2026.4.1.0",
                "nncf==3.4.0",
            ),
        },
    }
)
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# llama.cpp chooses when it is built.
_CMAKE_FOR: Mapping[str | None, Sequence[str]] = MappingProxyType(
    {
        None: (),
        "avx2": (
            "-DGGML_NATIVE=OFF",
            "-DGGML_AVX=ON",
            "-DGGML_AVX2=ON",
            "-DGGML_BMI2=ON",
            "-DGGML_F16C=ON",
            "-DGGML_FMA=ON",
        ),
    }
)


class Refused(Exception):
    """A peer that does not install, convert, load or answer; the message says why."""


def folder() -> Path:
    """Where environments, checkpoints and conversions are kept."""
    path = harness.folder() / "peers"
    path.mkdir(exist_ok=True)
    return path


def python(venv: str, peer: str) -> Path:
    """The interpreter of the environment, in which the peer is installed once."""
    pins = PINS[venv]
    root = folder() / f"venv-{venv}-{_digest(TORCH, *sorted(map(str, pins.items())))}"
    interpreter = root / "bin" / "python"
    if not (root / "torch.stamp").exists():
        for old in folder().glob(f"venv-{venv}-*"):
            shutil.rmtree(old)
        harness.say(f"making {root.name}")
        run([sys.executable, "-m", "venv", str(root)], "its environment")
        index = os.environ.get("EPIKV_TORCH_INDEX")  # as deploy/setup.sh has it
        _pip(interpreter, "--no-deps", TORCH, *(["--index-url", index] if index else []))
        (root / "torch.stamp").touch()
    if not (root / f"{peer}.stamp").exists():
        harness.say(f"installing {', '.join(pins[peer])}")
        constraints = root / "constraints.txt"
        constraints.write_text(f"{TORCH}\n")
        if peer != "transformers" and "transformers" in pins:
            python(venv, "transformers")
        _pip(interpreter, "-c", str(constraints), TORCH, *pins[peer])
        # It is never used, and one that does not fit torch breaks what imports it if it is there.
        run([str(interpreter), "-m", "pip", "uninstall", "-qy", "torchvision"], "pip", env=_QUIET)
        (root / f"{peer}.stamp").touch()
    return interpreter


def llama(cpu: str | None = None) -> Path:
    """llama.cpp as llama-cpp-python's source archive has it: `sources` with the bindings, and
    `build/bin` with its libraries and llama-server. Built once for each `cpu` (of process.HELD;
    None: this processor), which takes a quarter of an hour."""
    options = (*_CMAKE, *_CMAKE_FOR[cpu])
    root = folder() / f"llama-{LLAMA}-{_digest(*options)}"
    if not (root / "built").exists():
        harness.say(f"building llama.cpp of llama-cpp-python {LLAMA}")
        root.mkdir(exist_ok=True)
        package = f"llama-cpp-python=={LLAMA}"
        source = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(root), package)
        run([sys.executable, "-m", "pip", "download", "-q", *source], "its sources", env=_QUIET)
        shutil.unpack_archive(next(root.glob("*.tar.gz")), root)
        shutil.rmtree(root / "sources", ignore_errors=True)
        (root / f"llama_cpp_python-{LLAMA}").rename(root / "sources")
        sources = str(root / "sources" / "vendor" / "llama.cpp")
        run(["cmake", "-S", sources, "-B", str(root / "build"), "-G", "Ninja", *options], "cmake")
        jobs = os.environ.get("EPIKV_JOBS", "1")
        run(
            ["nice", "cmake", "--build", str(root / "build"), "-j", jobs, "-t", "llama-server"],
            "its build",
        )
        (root / "built").touch()
    return root


def run(command: Sequence[str], what: str, env: Mapping[str, str] | None = None) -> None:
    """Raises Refused with the last line that it said. `env` is added to the environment."""
    try:
        done = subprocess.run(
            command,
            check=False,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise Refused(f"{what}: {error}") from error
    if done.returncode != 0:
        raise Refused(f"{what}: {last_line(done.stdout) or f'status {done.returncode}'}")


def last_line(text: str) -> str:
    """The last that says anything, of a program that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-400:] if lines else ""


_QUIET = MappingProxyType({"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def _pip(interpreter: Path, *arguments: str) -> None:
    run([str(interpreter), "-m", "pip", "install", "-q", *arguments], "pip", env=_QUIET)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
