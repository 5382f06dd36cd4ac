"""docs/envoy.md, pasted: from one daemon to three behind Envoy, and the same with TLS and tokens.

Other than there are ports, and what a checkout would have: a model, and programs on PATH.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from envoy_proxy import program
from epikv.scrape import scrape
from epikv.testing import find_binary
from page_blocks import ROOT, blocks
from shell import Shell, free_ports
from waiting import eventually

PAGE = ROOT / "docs" / "envoy.md"
ENVOY, ADMIN = "50050", "9901"
CLIENTS, OPERATORS = ("50051", "50061", "50071"), ("50052", "50062", "50072")
METRICS = ("9464", "9465", "9466")
PROGRAMS = {
    ".venv/bin/epikv": f"""\
export EPIKV_SERVER=${{{{EPIKV_SERVER:-127.0.0.1:{CLIENTS[0]}}}}}
exec {{python}} -c 'from epikv.cli import main; main()' "$@"
""",
    ".venv/bin/python": 'exec {python} "$@"\n',
    ".venv/bin/envoy": 'exec {envoy} "$@"\n',
    "build/dev/server/epikvd": 'exec {binary} "$@" --threads=1\n',
}


class Pasted:
    """What looks like a checkout, with ports of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._ports = free_ports(ENVOY, ADMIN, *CLIENTS, *OPERATORS, *METRICS)
        shutil.copy(model, folder / "model.pt")
        (folder / "deploy").mkdir()
        for path in (ROOT / "deploy" / "envoy").iterdir():
            to = folder / "deploy" / "envoy" / path.name
            to.parent.mkdir(exist_ok=True)
            to.write_text(self.at_own_ports(path.read_text()))
        own = {"python": sys.executable, "binary": find_binary(), "envoy": program()}
        for name, script in PROGRAMS.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{self.at_own_ports(script.format(**own))}")
            path.chmod(0o755)
        self.shell = Shell(folder)

    def at_own_ports(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(self._ports)})\b", lambda port: self._ports[port[0]], text)

    def run(self, section: str, after: dict[str, Callable[[str], None]]) -> None:
        """The section's commands, one after another. after: by how one begins, what holds then, in its order."""
        left = list(after.items())
        for command in commands(section):
            command = self.at_own_ports(command)
            self.shell.ok(command)
            if left and command.startswith(left[0][0]):
                left.pop(0)[1](command)
        assert not left

    def completions(self) -> list[float]:
        """That each replica has been asked for; of one that has gone, -1."""
        return [self._asked(self._ports[port]) for port in METRICS]

    @staticmethod
    def _asked(port: str) -> float:
        try:
            page = scrape(f"127.0.0.1:{port}")
        except OSError:
            return -1
        return page.total("epikv_grpc_requests_total", method="GenerationService/Generate")


def commands(section: str) -> list[str]:
    """What goes on in the next line is one."""
    begin = PAGE.read_text().splitlines().index(f"## {section}")
    [block] = [block for block in blocks(PAGE) if block.line > begin][:1]
    assert "envoy_page_test" in block.note
    return block.text.replace("\\\n", "").splitlines()


@pytest.fixture
def pasted(sample_model: Path, tmp_path: Path) -> Iterator[Pasted]:
    made = Pasted(tmp_path, sample_model)
    try:
        yield made
    finally:
        made.shell.kill()


def test_one_daemon_becomes_three(pasted: Pasted) -> None:
    def goes_to_one_replica(generate: str) -> None:
        def does() -> bool:
            before = pasted.completions()
            for _ in range(3):
                pasted.shell.ok(generate)
            added = [now - then for now, then in zip(pasted.completions(), before, strict=True)]
            return sorted(added) == [0, 0, 3]

        eventually(does)  # once Envoy has found all replicas

    def draining_is_not_noticed(_: str) -> None:
        assert pasted.shell.ok("epikv models")

    def one_has_gone(_: str) -> None:
        assert pasted.completions()[2] == -1

    def nothing_is_left(_: str) -> None:
        assert pasted.completions() == [-1, -1, -1]

    generate = 'epikv generate "$problem"'
    after = {
        generate: goes_to_one_replica,
        "epikv admin": draining_is_not_noticed,
        "kill -9 $c": one_has_gone,
        "kill $envoy": nothing_is_left,
    }
    pasted.run("From one daemon to three", after)


def test_tls_and_tokens_go_through(pasted: Pasted) -> None:
    def is_for_those_who_may(generate: str) -> None:
        assert sum(pasted.completions()) == 1
        assert "UNAUTHENTICATED" in pasted.shell.refused(f"EPIKV_TOKEN=no {generate}")
        assert "UNAVAILABLE" in pasted.shell.refused(f"EPIKV_TLS_CA= {generate}")

    pasted.run("With TLS and tokens", {"epikv generate": is_for_those_who_may})
