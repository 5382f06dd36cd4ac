"""A fleet of bad clients against one daemon, and ten honest ones beside them.

    python tests/hostile/hostile.py [MINUTES] [--proxy haproxy|envoy] [--seed N] [--decoy] [--only ATTACK]...

Phases alternate: the honest clients alone, and beside all attacks at once. They ask for half of what ten clients get
through alone. Each answer is compared, byte by byte, with that of the same request alone. At the end of each phase under
attack the daemon is stopped (SIGSTOP) for ten seconds; requests of that time must end well, too, and count for no
figure. Exit status 1: goodput, times to first token, bytes, or what the daemon holds afterwards are not as they must be.

What it holds is compared with what it held after half a minute of all attacks: what is done for the first time takes
memory once.

The daemon has cores of its own, and honest clients go before attackers on the others: in life all have machines of
their own.

With --decoy there is a third phase: the attacks go to another daemon of this machine. What honest clients lose there
they lose to the attackers' need of cores, and not through the port.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in ("soak", "fixtures/python", "hostile"):
    sys.path.insert(0, str(HERE.parent / folder))

from attacks import ATTACKS, Target  # noqa: E402
from epikv import processes  # noqa: E402
from epikv.scrape import scrape  # noqa: E402
from figures import Answer, Comparison, Kind, Phase  # noqa: E402
from honest import OUTPUT_TOKENS, Task, program  # noqa: E402
from soak import sample_model  # noqa: E402
from watch import Held, held  # noqa: E402
from world import World, go_wrong, world  # noqa: E402

CAPACITY_SECONDS = 10.0
WARM_SECONDS = 30.0
REST_SECONDS = 30.0
STOPPED_SECONDS = 10.0
AFTER_SECONDS = 15.0  # of the phase after the stop
QUIET_SECONDS = 120.0
MOST_GROWTH_MIB = 48
SPARE_THREADS, SPARE_FILES = 8, 8


def ask_honest(task: Task) -> object:
    """What the process of honest clients answers."""
    done = subprocess.run(
        program(), input=json.dumps(asdict(task)), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the honest clients failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def answers_of(told: object) -> list[Answer]:
    assert isinstance(told, list)
    return [Answer(**answer) for answer in told]


class Fleet:
    """All attacks, each in a process."""

    def __init__(self, target: Target, names: Sequence[str]) -> None:
        self._attackers = {}
        for name in names:
            script = [sys.executable, str(HERE / "run_attack.py")]
            process = processes.start(
                script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps({"name": name, **asdict(target)}).encode())
            process.stdin.close()
            self._attackers[name] = process

    def ends(self, into: dict[str, Counter[str]]) -> None:
        """Waits for all. Raises RuntimeError for one that broke."""
        for name, process in self._attackers.items():
            assert process.stdout is not None and process.stderr is not None
            told, wrong = process.stdout.read(), process.stderr.read()
            if process.wait() != 0:
                raise RuntimeError(f"the attack {name} broke: {wrong.decode()[-2000:]}")
            into[name].update(json.loads(told))


class Hour:
    def __init__(
        self,
        made: World,
        decoy: World | None,
        seconds: float,
        rounds: int,
        seed: int,
        only: Sequence[str],
    ):
        self.world, self.decoy, self.seconds, self.rounds = made, decoy, seconds, rounds
        self.names = list(only) or list(ATTACKS)
        self.ends: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        self.draw = random.Random(seed)
        self.task = Task(
            made.clients, str(made.ca), made.tokens["ann"], seconds, 0, seed=seed, expected={}
        )
        self.phases: dict[Kind, list[Phase]] = {kind: [] for kind in Kind}
        self.shaken: list[Answer] = []  # while the daemon was stopped, and after it

    def prepare(self) -> None:
        expected = ask_honest(self.task)
        assert isinstance(expected, dict)
        self.task = replace(self.task, expected=expected)
        fast = answers_of(ask_honest(replace(self.task, seconds=CAPACITY_SECONDS)))
        if bad := [a for a in fast if a.status != "OK" or not a.right]:
            raise RuntimeError(
                f"{len(bad)} of {len(fast)} answers are bad without any attack: {bad[0]}"
            )
        self.task = replace(self.task, rate=len(fast) / CAPACITY_SECONDS / 2)
        print(
            f"ten honest clients get through {len(fast) / CAPACITY_SECONDS:.1f} requests a second of"
            f" {OUTPUT_TOKENS} tokens; they ask for {self.task.rate:.1f}",
            flush=True,
        )

    def warm(self) -> None:
        """Each attack, for the first time."""
        Fleet(self.target(self.world, WARM_SECONDS, seed=0), self.names).ends(self.ends)
        time.sleep(REST_SECONDS)

    def target(self, made: World, seconds: float, seed: int) -> Target:
        return Target(
            made.clients,
            made.daemon.admin.replace("127.0.0.1", "localhost"),
            str(made.ca),
            made.tokens["eve"],
            time.time() + seconds,
            seed,
        )

    def phase(self, kind: Kind, seed: int) -> Phase:
        """Phases of one seed are asked for the same, at the same moments."""
        task = replace(self.task, seed=seed)
        # What is due shortly before the stop may meet it.
        calm = self.seconds - 5
        if kind is Kind.ALONE:
            answers = answers_of(ask_honest(task))
        else:
            answers = self.beside_attacks(self.decoy if kind is Kind.DECOY else self.world, task)
        if kind is Kind.ATTACKED:
            self.shaken += [a for a in answers if a.due >= calm]
        made = Phase(calm, [a for a in answers if a.due < calm])
        self.phases[kind].append(made)
        return made

    def beside_attacks(self, made: World, task: Task) -> list[Answer]:
        """Of honest clients while `made` is attacked. If it is theirs, it is stopped at the end."""
        stopped = made is self.world
        more = STOPPED_SECONDS + AFTER_SECONDS if stopped else 0
        target = self.target(made, self.seconds, task.seed)
        fleet = Fleet(target, self.names)
        weather = threading.Thread(target=go_wrong, args=(made, self.seconds))
        weather.start()
        honest = subprocess.Popen(
            program(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert honest.stdin is not None
        honest.stdin.write(json.dumps(asdict(replace(task, seconds=self.seconds + more))))
        honest.stdin.close()
        honest.stdin = None
        time.sleep(max(0, target.until - time.time()))
        fleet.ends(self.ends)
        weather.join()
        if stopped:
            os.kill(made.daemon.pid, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(made.daemon.pid, signal.SIGCONT)
        told, wrong = honest.communicate()
        if honest.returncode != 0:
            raise RuntimeError(f"the honest clients failed: {wrong[-2000:]}")
        return answers_of(json.loads(told))

    def run(self) -> None:
        for number in range(self.rounds):
            seed = self.draw.randrange(2**32)
            for kind in Kind:
                if kind is Kind.DECOY and self.decoy is None:
                    continue
                latest = self.phase(kind, seed)
                print(
                    f"round {number + 1} of {self.rounds}, {kind.value}:"
                    f" {len(latest.answers)} honest requests, {latest.goodput:.2f} a second ended well,"
                    f" {latest.wrong} wrong; {_what(latest.answers)};"
                    f" TTFT at p50 {latest.ttft(50):.3f} s, at p99 {latest.ttft(99):.3f} s",
                    flush=True,
                )


def _what(answers: Sequence[Answer]) -> str:
    return ", ".join(f"{what} {n}" for what, n in Counter(a.status for a in answers).most_common())


def over(now: Held, before: Held) -> list[str]:
    found = []
    if now.threads > before.threads + SPARE_THREADS:
        found.append(f"{now.threads} threads, {before.threads} before")
    if now.files > before.files + SPARE_FILES:
        found.append(f"{now.files} open files, {before.files} before")
    if now.rss_kib > before.rss_kib + MOST_GROWTH_MIB * 1024:
        found.append(
            f"{now.rss_kib / 1024:.0f} MiB beside what is kept, {before.rss_kib / 1024:.0f} before"
        )
    return found


def come_back(made: World, before: Held) -> tuple[Held, list[str]]:
    """What the daemon holds once the fleet has gone, and what is too much of it."""
    deadline = time.monotonic() + QUIET_SECONDS
    while (left := over(now := held(made.daemon), before)) and time.monotonic() < deadline:
        time.sleep(1)
    return now, left


def report(hour: Hour, first: Held, before: Held, now: Held, left: list[str]) -> list[str]:
    """Prints it all; what does not hold."""
    print("\nattack                  what became of it")
    for name, ends in hour.ends.items():
        told = ", ".join(f"{what} {n}" for what, n in ends.most_common())
        print(f"{name:23} {told}")
    comparison = Comparison(hour.phases)
    print("", *comparison.lines(), sep="\n")
    print(f"while stopped, after  {_what(hour.shaken)}")
    print(
        f"held before, after    {before.rss_kib / 1024:.0f}, {now.rss_kib / 1024:.0f} MiB beside what is kept"
        f" ({first.rss_kib / 1024:.0f} before any attack); open files {before.files}, {now.files};"
        f" threads {before.threads}, {now.threads}"
    )
    disk = shutil.disk_usage(hour.world.disk)
    print(f"disk of spool, log    {100 * disk.used / disk.total:.0f} % used")
    page = scrape(hour.world.daemon.metrics)
    kept = {
        kind: page.value("epikv_resident_memory_bytes", kind=kind) / 2**20
        for kind in ("kv_touched", "signals", "constraints")
    }
    print(
        f"kept afterwards       {', '.join(f'{kind} {mib:.0f} MiB' for kind, mib in kept.items())}"
    )
    for name in ("epikv_connections_refused_total", "epikv_requests_rejected_total"):
        print(f"{name:22} {page.total(name):.0f}")
    found = [*comparison.failures(), *left]
    if wrong := sum(not a.right for a in hour.shaken):
        found.append(f"{wrong} answers around the stop have wrong bytes")
    if lost := sum(a.status != "OK" for a in hour.shaken):
        found.append(f"{lost} requests around the stop did not end well")
    return found


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", type=float, nargs="?", default=60.0)
    parser.add_argument("--proxy", choices=["haproxy", "envoy"])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--decoy", action="store_true")
    parser.add_argument("--only", action="append", default=[], choices=ATTACKS)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    rounds = max(1, round(arguments.minutes / 10))
    seconds = max(12.0, 60 * arguments.minutes / rounds / 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epikv-hostile-")))

        def a_world(name: str) -> World:
            (folder / name).mkdir()
            return stack.enter_context(world(sample_model(), folder / name, arguments.proxy))

        made = a_world("attacked")
        decoy = a_world("decoy") if arguments.decoy else None
        hour = Hour(made, decoy, seconds, rounds, arguments.seed, arguments.only)
        hour.prepare()
        first = held(made.daemon)
        hour.warm()
        before = held(made.daemon)
        hour.run()
        now, left = come_back(made, before)
        found = report(hour, first, before, now, left)
        for sentence in found:
            print(f"FAILED: {sentence}")
        if found:
            print(
                f"seed {arguments.seed}; the daemon's last words:",
                *made.daemon.log.splitlines()[-15:],
                sep="\n",
            )
    print("FAILED" if found else "all held")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
