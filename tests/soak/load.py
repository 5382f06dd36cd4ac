"""Clients of one daemon: waves of them, and what came of their requests."""

import itertools
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import again
import facts
import watch
from calls import Caller, Outcome, Wrong
from cases import Case, Cases
from epikv.scrape import Page, scrape
from epikv.testing import Daemon
from operators import Operator

REPLAYS_PER_POLICY = 2  # of each wave
SCORED_SHARE, BUDGET_SHARE = 0.25, 0.5  # of what could be asked again at once
RETRY_SECONDS = 0.5  # where the daemon names no delay
PROGRESS_SECONDS = 30.0
SETTLE_SECONDS = 1.0  # until the connection that asked for the policies is closed


@dataclass(frozen=True)
class Failure:
    case: Case | None
    what: str


class Load:
    """Requests of one seed, by `clients` threads at a time. `chunk`: the daemon's prefill chunk."""

    def __init__(
        self,
        daemon: Daemon,
        seed: int,
        clients: int,
        chunk: int,
        operator: Operator | None = None,
        spare_files: int = 0,
    ) -> None:
        """spare_files: that the daemon may open later, as for a second session of its store."""
        with daemon.client() as client:
            models = client.models()
            known = client.policies(model=models[0].name)
        policies = [p for p in known if p.has_artefact or not p.needs_artefact]
        self._daemon = daemon
        self._seed = seed
        self._clients = clients
        self._operator = operator
        self._spare_files = spare_files
        self._cases = Cases(seed, models, policies)
        self._rules = facts.Rules(
            {model.name: model for model in models},
            {policy.name: policy for policy in policies},
            chunk,
        )
        self._numbers = itertools.count()
        self._draining = False
        self._begin = time.monotonic()
        self._lock = threading.Lock()  # of what follows, while clients run
        self._to_replay: dict[str, list[Outcome]] = {}
        self.failures: list[Failure] = []
        self.outcomes: Counter[str] = Counter()
        # Of clients; "malformed": the request was made invalid.
        self.behaviours: Counter[str] = Counter()
        self.of_policy: dict[str, Counter[str]] = {policy.name: Counter() for policy in policies}
        self.rests: list[watch.Held] = []
        self.page = Page({})  # of the last rest

    @property
    def deeds(self) -> Counter[str]:
        """Of the operator."""
        return self._operator.did if self._operator is not None else Counter()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def wave(self, seconds: float, *, operated: bool = True) -> None:
        """Returns when all clients have left. operated: the operator, if there is one, works meanwhile."""
        end = time.monotonic() + seconds
        if self._operator is not None and operated:
            self._operator.begin()
        threads = [threading.Thread(target=self._client, args=(end,)) for _ in range(self._clients)]
        for thread in threads:
            thread.start()
        said = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                self._tell_progress()
        if self._operator is not None and (error := self._operator.end()):
            self.failures.append(Failure(None, f"the operator met {error}"))

    def rest(self) -> None:
        """Raises Wrong unless everything is given back, to what was held at the first rest."""
        baseline = self.rests[0] if self.rests else None
        if baseline is None:
            time.sleep(SETTLE_SECONDS)
        self.rests.append(watch.at_rest(self._daemon, self.seconds, baseline, self._spare_files))
        self.page = scrape(self._daemon.metrics)

    def replay(self) -> None:
        """Some requests of the last wave, each alone."""
        outcomes = [outcome for some in self._to_replay.values() for outcome in some]
        self._to_replay.clear()
        caller = Caller(self._daemon.grpc)
        for first in outcomes:
            self._guard(first.case, lambda first=first: self._replay(caller, first))
        caller.close()

    def drain(self, seconds: float) -> None:
        """SIGTERM that long after a wave's start. Raises Wrong unless the daemon then ends well."""
        timer = threading.Timer(seconds, self._terminate)
        timer.start()
        self.wave(2 * seconds, operated=False)
        timer.join()
        if (status := self._daemon.stop()) != 0:
            raise Wrong(f"the daemon ended with status {status} after SIGTERM")

    def case(self, number: int) -> Case:
        return self._cases.make(number)

    def alone(self, case: Case) -> Outcome:
        """The request with no other around, and what follows from it."""
        caller = Caller(self._daemon.grpc)
        outcome = caller.run(case)

        def check() -> None:
            self._rules.check(outcome)
            if outcome.accepted is not None:
                self._replay(caller, outcome)
            if again.can_score(outcome):
                self._score(caller, outcome)

        self._guard(case, check)
        caller.close()
        return outcome

    def _terminate(self) -> None:
        self._draining = True
        self._daemon.terminate()

    def _client(self, end: float) -> None:
        caller = Caller(self._daemon.grpc)
        while time.monotonic() < end and not self.failures:
            case = self._cases.make(next(self._numbers))
            self._guard(case, lambda case=case: self._request(caller, case))
        caller.close()

    def _guard(self, case: Case, work: Callable[[], None]) -> None:
        """Runs it; whatever goes wrong becomes a failure, for a thread would end in silence."""
        try:
            work()
        except Wrong as error:
            what = "\n".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:
            what = traceback.format_exc()
        else:
            return
        with self._lock:
            self.failures.append(Failure(case, what))

    def _request(self, caller: Caller, case: Case) -> None:
        begin = time.monotonic()
        outcome = caller.run(case)
        with _seed_told(outcome):
            self._check(outcome, begin)
            self._count(outcome)
            self._ask_again(caller, outcome)

    def _check(self, outcome: Outcome, begin: float) -> bool:
        """Raises Wrong for what must not be. False: a drain, or the daemon's end, said nothing of the request."""
        drained = self._operator is not None and self._operator.drained_since(begin)
        self._rules.check(outcome, stopping=self._draining, drained=drained)
        error = outcome.error
        return error is None or not (self._draining or facts.was_drained(error))

    def _ask_again(self, caller: Caller, outcome: Outcome) -> None:
        """What a client may do next: wait, score, try another budget."""
        case, error = outcome.case, outcome.error
        if error and error.code in (facts.EXHAUSTED, facts.UNAVAILABLE):
            time.sleep(error.retry_delay or RETRY_SECONDS)
        if self._draining:
            return
        rng = random.Random(f"{self._seed}/{case.number}/again")
        if outcome.accepted is not None:
            self._keep(rng, outcome)
        if again.can_score(outcome) and rng.random() < SCORED_SHARE:
            self._score(caller, outcome)
        small = error and error.reason == "KV_BUDGET" and not case.faults
        if small and rng.random() < BUDGET_SHARE:
            self._try_budgets(rng, caller, outcome)

    def _count(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[facts.tally(outcome)] += 1
            self.behaviours["malformed" if outcome.case.faults else outcome.case.behaviour] += 1
            if outcome.accepted is not None:
                did = self.of_policy[outcome.accepted.kv.policy]
                did["accepted"] += 1
                did["ended well"] += outcome.summary is not None

    def _did(self, outcome: Outcome, what: str) -> None:
        with self._lock:
            self.of_policy[outcome.accepted.kv.policy][what] += 1

    def _keep(self, rng: random.Random, outcome: Outcome) -> None:
        """For the replay: some of each policy, early and late in the wave."""
        with self._lock:
            kept = self._to_replay.setdefault(outcome.accepted.kv.policy, [])
            if len(kept) < REPLAYS_PER_POLICY:
                kept.append(outcome)
            elif rng.random() < 0.1:
                kept[rng.randrange(REPLAYS_PER_POLICY)] = outcome

    def _replay(self, caller: Caller, first: Outcome) -> None:
        with _seed_told(first):
            second = caller.run(again.replayed(first))
            self._rules.check(second)
            facts.same_answer(first, second)
        self._did(first, "replayed")

    def _score(self, caller: Caller, generated: Outcome) -> None:
        begin = time.monotonic()
        case = again.scored(generated)
        while (scored := caller.run(case)).error and not self._draining:
            if scored.error.reason != "QUEUE_FULL":
                break
            time.sleep(scored.error.retry_delay)
        if not self._check(scored, begin):
            return
        facts.same_scores(generated, scored)
        self._did(generated, "scored")

    def _try_budgets(self, rng: random.Random, caller: Caller, refused: Outcome) -> None:
        begin = time.monotonic()
        smallest, too_small = facts.budgets_to_try(rng, refused.error)
        enough = caller.run(again.with_budget(refused.case, smallest))
        if not self._check(enough, begin):
            return
        if enough.error and enough.error.reason == "KV_BUDGET":
            raise Wrong(f"the smallest budget that it named was refused: {enough.error}")
        if too_small is None:
            return
        refused_again = caller.run(again.with_budget(refused.case, too_small))
        if not self._check(refused_again, begin):
            return
        error = refused_again.error
        if not error or error.metadata.get("min") != refused.error.metadata["min"]:
            raise Wrong(f"budget {too_small}, below the smallest {smallest}, ended with {error}")

    def _tell_progress(self) -> None:
        if self._draining:
            return
        page = scrape(self._daemon.metrics)
        rss = watch.held(self._daemon).rss_kib / 1024
        print(
            f"[{self.seconds:6.1f} s] {self.outcomes.total()} requests,"
            f" {self.outcomes['ok']} ok; {page.total('epikv_requests_running'):.0f} running,"
            f" {page.total('epikv_requests_waiting'):.0f} waiting; RSS {rss:.1f} MiB",
            flush=True,
        )


@contextmanager
def _seed_told(outcome: Outcome) -> Iterator[None]:
    """What is wrong names the seed, which the server may have drawn."""
    try:
        yield
    except Wrong as error:
        if outcome.accepted is not None:
            error.add_note(f"accepted with seed {outcome.accepted.sampling.seed}")
        raise
