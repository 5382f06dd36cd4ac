"""When the first token of a question over cached documents comes, beside prefilling them with it.

One daemon of one thread and a model of random weights, of the 0.5B shape. Each document is made a
packet once. A round asks, over each number of documents, once with their packets and once with all of
their tokens in one prompt, of which nothing is cached; a sample is the ratio of the times to the first
token, below 1 where packets are faster. The order of a round is turned round in the next.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.messages import Delta, Packet, Summary
from epikv.options import Stop
from epikv.stats import bootstrap

from epikv_lab.bench import overhead
from epikv_lab.bench.streams import random_prompt
from epikv_lab.bench.targets import finish

ARMS = ("packets", "prefill")
QUESTION = 32  # tokens
SHAPE: harness.Shape = {**overhead.SHAPE, "context": 16384}
POOL = 1 << 30  # bytes; of packets as many
FLAGS = (
    "--threads=1",
    f"--kv_pool_bytes={POOL}",
    f"--packet_bytes={POOL}",
    "--prefix_cache_share=0",
)
NO_TARGET = "what packets save is what they are for; the table says how much"


@dataclass(frozen=True)
class First:
    """Seconds to the first token."""

    daemon: float  # from the request's arrival, by its summary
    client: float


@dataclass(frozen=True)
class Made:
    """A document's packet."""

    packet: Packet
    seconds: float  # to create it, as the client sees it


class _Counts(click.ParamType):
    name = "N,N.."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        counts = value.split(",")
        if not all(count.isdecimal() and int(count) > 0 for count in counts):
            self.fail(f"'{value}' is not numbers with commas between them", param, ctx)
        return tuple(int(count) for count in counts)


@click.command("packets")
@click.option("--rounds", default=7, show_default=True)
@click.option(
    "--documents", "counts", type=_Counts(), default="1,4,16", show_default=True,
    help="So many stand before the question.",
)  # fmt: skip
@click.option("--tokens", default=512, show_default=True, help="Of each document.")
@harness.options
def command(
    rounds: int, counts: tuple[int, ...], tokens: int, json_file: Path | None, **where: Any
) -> None:
    """Time to the first token behind packets of documents, over that behind their prefill."""
    load = [os.getloadavg()[0]]
    samples: dict[int, list[dict[str, First]]] = {count: [] for count in counts}
    with harness.serving(
        lambda: harness.random_model("packets", **SHAPE), FLAGS, **where, needs_metrics=False
    ) as served:
        vocabulary = served.client.models()[0].vocab_size
        documents = [random_prompt(tokens, vocabulary, seed) for seed in range(max(counts))]
        question = random_prompt(QUESTION, vocabulary, seed=-1)
        made: list[Made] = []
        try:
            for document in documents:
                made.append(_make(served, document))
                harness.say(f"packet {len(made)} of {len(documents)}: {made[-1].seconds:.2f} s")
            # The first of each are slow, and so is memory that nobody has written.
            _ask(served, "packets", documents, made, question)
            _ask(served, "prefill", documents[:1], made, question)
            for number in range(rounds):
                for count in counts:
                    order = ARMS if number % 2 == 0 else ARMS[::-1]
                    asked = documents[:count]
                    taken = {arm: _ask(served, arm, asked, made, question) for arm in order}
                    samples[count].append({arm: taken[arm] for arm in ARMS})
                    said = ", ".join(f"{arm} {1e3 * taken[arm].daemon:.1f} ms" for arm in ARMS)
                    harness.say(f"round {number + 1}, {count} x {tokens} tokens: {said}")
        finally:  # it may be somebody else's daemon
            for packet_id in {each.packet.id for each in made}:
                served.client.delete_packet(packet_id)
    load.append(os.getloadavg()[0])

    figures = {count: told(samples[count], made[:count]) for count in counts}
    click.echo(f"\n{table(figures, tokens)}\n")
    details = {
        "shape": SHAPE,
        "rounds": rounds,
        "tokens": tokens,
        "question": QUESTION,
        "load_average": load,
        "figures": figures,
        "made": [{"bytes": each.packet.bytes, "seconds": each.seconds} for each in made],
        "samples": {
            count: [{arm: asdict(first) for arm, first in taken.items()} for taken in of]
            for count, of in samples.items()
        },
    }
    finish("packets", [], details, json_file, untargeted=NO_TARGET)


def _make(served: harness.Served, document: Sequence[int]) -> Made:
    begin = time.monotonic()
    packet = served.client.create_packet(document).packet
    assert packet is not None
    return Made(packet, time.monotonic() - begin)


def _ask(
    served: harness.Served,
    arm: str,
    documents: Sequence[Sequence[int]],
    made: Sequence[Made],
    question: Sequence[int],
) -> First:
    """Raises ClickException if anything was cached but what packets hold."""
    behind = sum(len(document) for document in documents)
    ids: list[str] = []
    prompt = list(question)
    if arm == "packets":
        ids = [each.packet.id for each in made[: len(documents)]]
    else:
        prompt = [token for document in documents for token in document] + prompt
    first: float | None = None
    begin = time.monotonic()
    for event in served.client.generate(prompt, packets=ids, stop=Stop(1, ignore_eos=True)):
        match event:
            case Delta() if first is None:
                first = time.monotonic() - begin
            case Summary(usage=usage, timings=timings):
                assert first is not None and usage is not None and timings is not None
                assert timings.time_to_first_token is not None
                found = (usage.prompt_tokens, usage.packet_prompt_tokens)
                assert found == (behind + len(question), behind if ids else 0), found
                if usage.cached_prompt_tokens:
                    raise click.ClickException(
                        f"{usage.cached_prompt_tokens} tokens of a prompt were cached: the server"
                        " has to run with --prefix_cache_share=0"
                    )
                return First(timings.time_to_first_token, first)
    raise click.ClickException("a stream ended without a summary")


def told(rounds: Sequence[Mapping[str, First]], made: Sequence[Made]) -> dict[str, Any]:
    """Of so many documents: their packets, and the two times in the same rounds."""
    pairs = [(taken["packets"], taken["prefill"]) for taken in rounds]
    return {
        "bytes": sum(each.packet.bytes for each in made),
        "create_seconds": median(each.seconds for each in made),
        "milliseconds": {arm: 1e3 * median(taken[arm].daemon for taken in rounds) for arm in ARMS},
        "ratio": asdict(bootstrap([packets.daemon / whole.daemon for packets, whole in pairs])),
        "client": asdict(bootstrap([packets.client / whole.client for packets, whole in pairs])),
    }


def table(figures: Mapping[int, Mapping[str, Any]], tokens: int) -> str:
    """Of `told`, by number of documents, in Markdown."""
    lines = [
        f"| documents of {tokens} tokens | MB of packets | s to create one | ms behind packets"
        " | ms behind prefill | packets over prefill | the same, as the client sees it |",
        "|---|---|---|---|---|---|---|",
    ]
    for count, found in figures.items():
        ratio, client = (
            f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"
            for e in (found["ratio"], found["client"])
        )
        ms = found["milliseconds"]
        lines.append(
            f"| {count} | {found['bytes'] / 1e6:.1f} | {found['create_seconds']:.2f}"
            f" | {ms['packets']:.1f} | {ms['prefill']:.1f} | {ratio} | {client} |"
        )
    return "\n".join(lines)
