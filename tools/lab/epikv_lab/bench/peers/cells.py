"""What is measured: a cell is a job, and the figure that is made of its reply.

decode1      tokens/s of one stream: 128 tokens behind a prompt of 128
streamsN     tokens/s of N such streams at once, their prompts' prefill included
prefillN     prompt tokens/s up to the first token
decodeN      tokens/s of one stream with N tokens of context, N the mean of 128 tokens
16xN         tokens/s of 16 streams while all decode with N tokens of context
lookup1      tokens/s of one stream that guesses by prompt lookup: 512 tokens behind a prompt of 128
generated4096  tokens/s of the last 128 of 4096 tokens behind a prompt of 64
memory       largest resident set in bytes of a fresh process that runs the job of streams16
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from epikv.options import Kv

from epikv_lab.bench.peers.process import Job, Reply
from epikv_lab.bench.streams import random_prompt

PROMPT = NEW = 128
BUDGET = 512  # of what evicts
BYTES = "bytes"
RATE = "tokens/s"


@dataclass(frozen=True)
class Cell:
    """Its name says the kind of figure."""

    name: str
    streams: int
    prompt: int
    new: int

    @property
    def kind(self) -> str:
        return "16x" if self.name.startswith("16x") else self.name.rstrip("0123456789")

    @property
    def unit(self) -> str:
        return BYTES if self.kind == "memory" else RATE

    @property
    def tokens(self) -> int:
        """That are cached at its end."""
        return self.streams * (self.prompt + self.new)

    @property
    def evicts(self) -> bool:
        """Whether what has a budget takes part: the context is beyond it."""
        return self.prompt + self.new >= 2 * BUDGET and self.kind != "prefill"

    def job(self, vocabulary: int, seed: int, kv: Kv, lookup: bool = False) -> Job:
        """With prompts that no other round, stream or cell has."""
        prompts = [
            random_prompt(self.prompt, vocabulary, hash((seed, self.prompt, stream)))
            for stream in range(self.streams)
        ]
        return Job(prompts, self.new, kv, lookup)

    def figure(self, reply: Reply) -> float:
        """In `unit`."""
        ends = [times[-1] for times in reply.times]
        first = reply.times[0]
        match self.kind:
            case "memory":
                return reply.peak
            case "prefill":
                return self.prompt / first[0]
            case "decode" | "lookup":
                return (self.new - 1) / (first[-1] - first[0])
            case "generated":
                return NEW / (first[-1] - first[-1 - NEW])
            case "streams":
                return self.streams * self.new / max(ends)
        return _together(reply.times)


def _together(times: Sequence[Sequence[float]]) -> float:
    """Tokens/s of all from when the last stream has its first token until the first has ended."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= begin:
        raise ValueError("the streams never decoded all at once")
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_FIXED = {
    cell.name: cell
    for cell in (
        Cell("decode1", 1, PROMPT, NEW),
        Cell("lookup1", 1, PROMPT, 4 * NEW),
        Cell("generated4096", 1, 64, 4096),
        Cell("memory", 16, PROMPT, NEW),
    )
}
GROUPS = MappingProxyType(
    {
        "targets": (
            *("decode1", "streams16", "prefill1024", "prefill4096", "decode512", "decode4096"),
            *("generated4096", "16x2048", "memory"),
        ),
        "concurrency": tuple(f"streams{n}" for n in CONCURRENCIES),
        "context": tuple(f"decode{n}" for n in CONTEXTS),
    }
)


def parse(text: str) -> list[Cell]:
    """Of names and groups with commas between. Raises ValueError for one that is neither."""
    names: dict[str, None] = {}
    for name in text.split(","):
        names |= dict.fromkeys(GROUPS.get(name, (name,)))
    return [_cell(name) for name in names]


def _cell(name: str) -> Cell:
    if name in _FIXED:
        return _FIXED[name]
    found = re.fullmatch(r"(streams|prefill|decode|16x)([1-9][0-9]*)", name)
    if not found:
        known = ", ".join([*GROUPS, *_FIXED, "streamsN", "prefillN", "decodeN", "16xN"])
        raise ValueError(f"'{name}' is no cell; known: {known}")
    kind, number = found[1], int(found[2])
    if kind == "streams":
        return Cell(name, number, PROMPT, NEW)
    if kind == "prefill":
        return Cell(name, 1, number, 1)
    # A step that reads 512 tokens of a prompt adds one to each stream before: the first still decodes
    # when the last begins.
    new = 2 * NEW + number // 32 if kind == "16x" else NEW
    if number <= new // 2:
        raise ValueError(f"{name}: a context is more than {new // 2} tokens")
    if kind == "16x":
        return Cell(name, 16, number - new // 2, new)
    return Cell(name, 1, number - NEW // 2, NEW)
