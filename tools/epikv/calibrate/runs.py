"""Many requests at once, with a bar that says how long it will take."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from epikv.client import Client, patiently
from epikv.messages import GenerateResult, ScoreResponse
from epikv.options import Kv, Output, Sampling, Stop

Work = TypeVar("Work")

FULL = Kv("full")


@dataclass(frozen=True)
class Runner:
    """A connection to the daemon, how many requests run on it together, and which model answers."""

    client: Client
    model: str
    context: int  # tokens
    at_once: int = 64

    def each(self, what: str, work: Callable[[Work], None], over: Iterable[Work]) -> None:
        """Calls `work` on all, `at_once` at a time. The first failure ends it: nothing more is
        started, and it is raised once what runs has ended."""
        pool = ThreadPoolExecutor(self.at_once)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        try:
            futures = [pool.submit(work, one) for one in over]
            if not futures:
                return
            with progress:
                bar = progress.add_task(what, total=len(futures))
                for future in as_completed(futures):
                    future.result()
                    progress.advance(bar)
        finally:
            pool.shutdown(cancel_futures=True)

    def complete(
        self,
        prompt: Sequence[int],
        most: int,
        kv: Kv = FULL,
        *,
        seed: int = 0,
        output: Output = Output(),
    ) -> GenerateResult:
        """A greedy completion of at most so many tokens, fewer where the context ends. seed: of
        policies that draw."""
        stop = Stop(max_output_tokens=min(most, self.context - len(prompt)))
        return patiently(
            lambda: self.client.generate_once(
                prompt,
                kv=kv,
                sampling=Sampling(seed=seed),
                stop=stop,
                output=output,
                model=self.model,
            )
        )

    def logprobs(
        self, prompt: Sequence[int], continuation: Sequence[int], kv: Kv = FULL, seed: int = 0
    ) -> ScoreResponse:
        """Of each token of the continuation given those before it; with evictions as they happen."""
        return patiently(
            lambda: self.client.score(
                prompt,
                continuation,
                kv=kv,
                chunked=kv == FULL,
                kv_trace=kv != FULL,
                seed=seed,
                model=self.model,
            )
        )

    def ids(self, text: str) -> list[int]:
        return self.client.tokenize(text, model=self.model)

    def text(self, ids: Sequence[int], **options: Any) -> str:
        return self.client.detokenize(ids, model=self.model, **options)


def room(tokens: int) -> int:
    """How long a completion may become whose like had so many tokens."""
    return tokens + max(64, tokens // 2)
