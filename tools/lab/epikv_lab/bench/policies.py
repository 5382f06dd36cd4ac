"""What every registered policy costs: CPU time a token and bytes a sequence, at two budgets.

A policy's cost is what the engine's thread spends in the stages taps, observe and evict (and for
the entropy of logits in sample) while one sequence decodes at its budget, over whole rounds. It
depends on layers, heads and cached tokens, not on the feed-forward blocks: windows are decoded by a
model that has nearly none, so that prompts are quick, and the share is taken of a step of the whole
shape under `full`. Both are in bfloat16 with one thread, and with the batch kernel: which one is
quickest is so close at some lengths that the choice would change from run to run.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import grpc
from epikv import harness
from epikv.errors import RpcError
from epikv.messages import Accepted, Policy
from epikv.options import Kv, Stop
from epikv.scrape import Page
from epikv.stats import Estimate, bootstrap

from epikv_lab.bench import overhead
from epikv_lab.bench.costs import write_costs
from epikv_lab.bench.streams import Running, cancel_all, random_prompt, wait_until
from epikv_lab.bench.targets import Target, finish

if TYPE_CHECKING:
    from epikv.export.manifest import Manifest

SHAPE: harness.Shape = {**overhead.SHAPE, "context": 8192}
THIN: harness.Shape = {**SHAPE, "ffn": 64}
CACHED = (512, 4096)
BOUND = 0.15  # of a step
# What attention is, or is made of: policies that need none of it leave the kernels as fast as they are.
ATTENTION = {"attention_row", "prompt_attention", "queries", "query_moments"}
ATTENTION_FREE_BOUND = 0.02
STAGES = ("taps", "observe", "evict")
ENTROPY = "logit_entropy"  # the signal that is measured in the stage sample
# Of policies that have no default for a model without calibration.
PARAMS: dict[str, dict[str, Any]] = {
    "thinkv_tbe": {"layers": [4, 12, 16, 20], "theta1": 0.3, "theta2": 0.6},
    "skipkv": {"ends": list(range(0, 2000, 20))},
}
# The daemon lists no signals of a policy without defaults. These two are made of attention.
ATTENTION_WITH_PARAMS = {"skipkv", "thinkv_tbe"}
# Prompts: below the budget for policies that cannot rank one; else over it, so that prefill ends
# with a round. As short as can be for those whose first round would drop most of a prompt, and
# whose next is then as many tokens away.
BELOW, OVER = 16, 64
WITH_SHORT_PROMPT = ("thinkv_tbe",)
MARGIN = 6  # steps before a window's end from which on its last round is waited for

README = Path(__file__).resolve().parents[4] / "policies" / "README.md"
COSTS = README.with_name("costs.inc")
BEGIN, END = "<!-- costs: begin -->\n", "<!-- costs: end -->\n"
ROW = "| `"  # how one begins


@dataclass(frozen=True)
class Window:
    """Steady decoding of one sequence between two scrapes. CPU seconds of the engine's thread."""

    steps: int
    rounds: int
    cpu: float
    stages: dict[str, float]

    @property
    def step(self) -> float:
        return self.cpu / self.steps

    def stage(self, *names: str) -> float:
        return sum(self.stages[name] for name in names) / self.steps


@dataclass(frozen=True)
class Cost:
    """Of a policy at one budget. Seconds are of one token."""

    cpu: list[float]  # one a window
    windows: list[Window]
    # The whole step's CPU time less that of `full`: a check of cpu, where slack is small. A larger one
    # lets the policy hold, and attend to, more tokens.
    step_beyond_full: list[float]
    reserved: int  # bytes of a sequence beyond the K and V that `full` holds at as many tokens
    room: int  # of these, K and V of the tokens that a round may let it hold over the budget


@click.command("policies")
@click.option("--policies", "wanted", default="all", metavar="all|NAME,NAME", show_default=True)
@click.option(
    "--cached", "budgets", type=int, multiple=True, default=CACHED, show_default=True,
    help="Tokens. Several: one after another.",
)  # fmt: skip
@click.option("--steps", default=128, show_default=True, help="Of a window, at least.")
@click.option("--rounds", default=1, show_default=True, help="Windows of each policy and budget.")
@click.option(
    "--write", is_flag=True, help="Write the measured rows of policies/README.md's table."
)
@harness.options
def command(
    wanted: str,
    budgets: tuple[int, ...],
    steps: int,
    rounds: int,
    write: bool,
    json_file: Path | None,
    **where: Any,
) -> None:
    """CPU time a token and bytes a sequence of every policy, at 512 and 4096 cached tokens."""
    if write and budgets != CACHED:
        raise click.UsageError("--write is for whole rows: leave --cached out")
    if where["server"] is not None:
        raise click.UsageError("it serves two models of its own: leave --server out")
    # Each prompt is run: what is found in the prefix cache would not be.
    flags = ["--threads=1", "--decode_kernel=batch", f"--kv_pool_bytes={1 << 30}"]
    flags.append("--prefix_cache_share=0")
    with harness.serving(
        lambda: harness.random_model("policies-whole", **SHAPE), flags, **where
    ) as served:
        _full(served, BELOW + steps, steps // 4)  # the first steps of a daemon are slow
        whole = {cached: _full(served, cached, steps // 4).step for cached in budgets}
    for cached, step in whole.items():
        harness.say(f"a step of the whole shape at {cached} cached tokens: {1e3 * step:.1f} ms CPU")

    costs: dict[str, dict[int, Cost]] = {}
    refused: dict[str, str] = {}
    model = harness.random_model("policies-thin", **THIN)
    flags.append(f"--artefact_dir={_artefacts(model)}")
    with harness.serving(lambda: model, flags, **where) as served:
        _full(served, BELOW + steps, steps // 4)
        thin = {cached: _full(served, cached, steps) for cached in budgets}
        policies = _chosen(served.client.policies(), wanted)
        for policy in policies:
            try:
                costs[policy.name] = {
                    cached: _cost(served, policy, cached, thin[cached], steps, rounds)
                    for cached in budgets
                }
            except RpcError as error:
                if error.code not in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.FAILED_PRECONDITION,
                ):
                    raise
                refused[policy.name] = str(error)
                harness.say(f"{policy.name}: not measured: {error}")
    if not costs:
        raise click.ClickException("no policy could be measured")

    table = _table(policies, costs, refused, whole)
    click.echo(f"\n{table}")
    made_with = f"epikv bench policies, {_processor()}"
    if write:
        README.write_text(_with_rows(README.read_text(), table))
        write_costs(_results(costs, whole, made_with), COSTS)
    targets = [
        Target(f"{policy.name}.{cached}", _share(cost, whole[cached]), _bound(policy))
        for policy in policies
        for cached, cost in costs.get(policy.name, {}).items()
    ]
    details = {
        "made_with": made_with,
        "shape": SHAPE,
        "windows_of": THIN,
        "full_step_seconds": whole,
        "thin_full": {cached: asdict(window) for cached, window in thin.items()},
        "costs": {n: {c: asdict(cost) for c, cost in by.items()} for n, by in costs.items()},
        "not_measured": refused,
    }
    finish("policies", targets, details, json_file)


def _artefacts(model: Path) -> Path:
    """A folder of what `epikv calibrate` would measure of the model, over random tokens."""
    from epikv.calibrate import artefacts, triattention
    from epikv.export import load

    folder = model.with_suffix(".artefacts")
    probe, triatt = folder / "epikv_probe.json", folder / "triattention.json"
    if not (probe.exists() and triatt.exists()):
        folder.mkdir(exist_ok=True)
        module, manifest, _ = load(model)
        data = triattention.measure(module, manifest, [random_prompt(256, SHAPE["vocab"], 0)])
        artefacts.write(triatt, "triattention", manifest, data=data, made_with={"tokens": 256})
        # Random weights foretell nothing, and any direction costs as much.
        draw = random.Random(0)
        weights = [draw.gauss(0, 1) for _ in range(manifest.hidden_size)]
        ages = [{"age": 16 << i, "weights": weights, "bias": 0.0} for i in range(8)]
        data = {"layer": len(manifest.layers) // 2, "weights": weights, "by_age": ages}
        artefacts.write(probe, "epikv_probe", manifest, data=data, made_with={"tokens": 0})
    _gates(model, folder)
    _profiles(model, folder)
    return folder


def _profiles(model: Path, folder: Path) -> None:
    """Of heads that are alike: lanes with equal budgets cost as much as any."""
    from epikv.calibrate import artefacts
    from epikv.export import load

    files = {policy: folder / f"{policy}.json" for policy in ("duo_attention", "headkv")}
    if all(file.exists() for file in files.values()):
        return
    _, manifest, _ = load(model)
    data = {"scores": [[1.0] * manifest.num_kv_heads for _ in manifest.layers]}
    for policy, file in files.items():
        artefacts.write(file, policy, manifest, data=data, made_with={"tokens": 0})


def _gates(model: Path, folder: Path) -> None:
    """As they are before they are trained, which costs as much; as wide as by default."""
    from epikv.calibrate import artefacts, dms, gates, retention
    from epikv.export import load

    kinds = {
        **retention.TRAININGS,
        "dms": dms.TRAINING,
        "kvzap": gates.Training(depth=2, bias=0.0),
    }
    if all((folder / f"{policy}.json").exists() for policy in (*kinds, "epikv_forecast")):
        return
    _, manifest, _ = load(model)
    _forecast(folder, manifest)
    for policy, training in kinds.items():
        made = gates.Gates(manifest, training).arrays()
        artefacts.write(
            folder / f"{policy}.json",
            policy,
            manifest,
            data={},
            arrays=made,
            made_with={"steps": 0},
        )


def _forecast(folder: Path, manifest: "Manifest") -> None:
    """Of random read-outs, for the ages that a calibration over long texts has; and of queries of no length."""
    from epikv.calibrate import artefacts, forecast, gates

    training = gates.Training(depth=1, bias=0.0)
    wide = replace(manifest, num_kv_heads=manifest.num_kv_heads * len(forecast.AGES))
    moments = forecast.Moments.none(manifest)
    moments.count = 1
    artefacts.write(
        folder / "epikv_forecast.json",
        "epikv_forecast",
        manifest,
        data={"ages": forecast.AGES},
        arrays={**gates.Gates(wide, training).arrays(), **forecast.queries(moments)},
        made_with={"tokens": 0},
    )


def _chosen(catalog: Sequence[Policy], wanted: str) -> list[Policy]:
    known = {policy.name: policy for policy in catalog if policy.name != "full"}
    names = list(known) if wanted == "all" else wanted.split(",")
    if unknown := set(names) - set(known):
        raise click.ClickException(f"no evicting policy is called {', '.join(sorted(unknown))}")
    return [known[name] for name in names]


def _cost(
    served: harness.Served, policy: Policy, cached: int, full: Window, steps: int, rounds: int
) -> Cost:
    kv = Kv(policy.name, cached, PARAMS.get(policy.name, {}), protect_prompt=False)
    reserved = _reserved(served, kv, cached + _slack(policy) + 2)
    reserved -= _reserved(served, Kv("full"), cached + 1)
    room = (_slack(policy) + 1) * served.client.models()[0].kv_bytes_per_token
    windows = [_window(served, policy, kv, steps, number) for number in range(rounds)]
    cpu = []
    for window in windows:
        # Sampling is everyone's: of it, what this one has beyond `full` is the signal's.
        entropy = window.stage("sample") - full.stage("sample") if ENTROPY in policy.signals else 0
        cpu.append(window.stage(*STAGES) + entropy)
    cost = Cost(cpu, windows, [window.step - full.step for window in windows], reserved, room)
    harness.say(
        f"{policy.name:<22} {cached:>5} {1e6 * median(cpu):9.0f} us a token,"
        f" whole step {1e6 * median(cost.step_beyond_full):+9.0f} us,"
        f" {windows[0].rounds} rounds in {windows[0].steps} steps, {reserved} bytes"
    )
    return cost


def _bound(policy: Policy) -> float:
    reads = ATTENTION & set(policy.signals) or policy.name in ATTENTION_WITH_PARAMS
    return BOUND if reads else ATTENTION_FREE_BOUND


def _slack(policy: Policy) -> int:
    """The default, which every evicting policy has."""
    default = next(param.default_value for param in policy.params if param.name == "slack")
    assert isinstance(default, int)
    return default


def _reserved(served: harness.Served, kv: Kv, total: int) -> int:
    """Bytes that admission reserves for a short prompt that grows to `total` tokens."""
    prompt = random_prompt(BELOW, SHAPE["vocab"], 0)
    stop = Stop(max_output_tokens=total - BELOW)
    with served.client.generate(prompt, kv=kv, stop=stop) as stream:
        accepted = next(stream)
        next(stream)  # its prefill is over, and in no later window
    served.wait_until_idle()
    assert isinstance(accepted, Accepted) and accepted.kv is not None
    return accepted.kv.reserved_bytes


def _full(served: harness.Served, cached: int, steps: int) -> Window:
    """Of a sequence that holds `cached` tokens on average."""
    stream = _start(served, Kv("full"), cached - steps // 2 - 2, 2 * steps, seed=0)
    pages = []
    for tokens in (2, 2 + steps):  # a step is counted before the next one's token comes
        wait_until(
            lambda: stream.tokens >= tokens,  # noqa: B023  asked at once
            [stream],
            "a stream",
        )
        pages.append(served.page())
    return _between(served, stream, pages[0], pages[1], "full")


def _window(served: harness.Served, policy: Policy, kv: Kv, steps: int, seed: int) -> Window:
    """At least `steps` tokens, from the end of one round to the end of another."""
    cached, name = kv.budget, policy.name
    assert isinstance(cached, int)
    prompt = cached - BELOW if policy.prompt_eviction == "refuses" else cached + OVER
    if name in WITH_SHORT_PROMPT:
        prompt = BELOW
    start = served.page()
    stream = _start(served, kv, prompt, SHAPE["context"] - prompt, seed)
    wait_until(lambda: stream.tokens >= 1, [stream], name)
    before = _page_when(
        served,
        stream,
        lambda page: _prefilled(page - start) == prompt and _rounds(page - start, name) > 0,
    )
    wait_until(lambda: _decoded(served.page() - before) >= steps - MARGIN, [stream], name)
    since = served.page()
    after = _page_when(
        served,
        stream,
        lambda page: _decoded(page - before) >= steps and _rounds(page - since, name) > 0,
    )
    return _between(served, stream, before, after, name)


def _start(served: harness.Served, kv: Kv, prompt: int, output: int, seed: int) -> Running:
    served.wait_until_idle()
    return Running(served.client, random_prompt(prompt, SHAPE["vocab"], seed), kv, output, seed)


def _page_when(served: harness.Served, stream: Running, done: Callable[[Page], bool]) -> Page:
    """The first page for which it is so: asked for all the time, to miss no step."""
    while not done(page := served.page()):
        stream.check()
        if stream.summary is not None:
            raise click.ClickException("a stream ended before its round")
    return page


def _prefilled(page: Page) -> int:
    return int(page.value("epikv_step_tokens_total", phase="prefill"))


def _decoded(page: Page) -> int:
    return int(page.value("epikv_step_tokens_total", phase="decode"))


def _rounds(page: Page, policy: str) -> int:
    return int(page.value("epikv_kv_eviction_seconds_count", policy=policy))


def _between(
    served: harness.Served, stream: Running, before: Page, after: Page, policy: str
) -> Window:
    """The window of two pages; ends the stream."""
    ended = stream.summary is not None
    cancel_all([stream])
    served.wait_until_idle()
    added = after - before
    steps = int(added.value("epikv_step_seconds_count", phase="decode"))
    # A page may be made in the middle of a step.
    if ended or _prefilled(added) or abs(_decoded(added) - steps) > 1:
        raise click.ClickException("the daemon did something else than decode this one stream")
    return Window(
        steps=steps,
        rounds=_rounds(added, policy),
        cpu=added.value("epikv_engine_cpu_seconds_total"),
        stages={
            stage: added.value("epikv_step_cpu_seconds_total", stage=stage)
            for stage in ("forward", "sample", *STAGES)
        },
    )


def _share(cost: Cost, step: float) -> Estimate:
    return bootstrap([cpu / step for cpu in cost.cpu])


def _table(
    policies: Sequence[Policy],
    costs: dict[str, dict[int, Cost]],
    refused: dict[str, str],
    whole: dict[int, float],
) -> str:
    """The README's: a line a policy, a figure a budget."""
    budgets = " / ".join(map(str, whole))
    steps = " / ".join(f"{1e3 * step:.1f}" for step in whole.values())
    step = f"CPU of a step under `full` at {budgets} cached tokens, in the newest measurement: "
    lines = [
        f"{step}{steps} ms. Each share is of its own run.\n",
        f"| policy | slack | CPU us a token, {budgets} | of a step | bytes a sequence | of these, K and V of a round |",
        "|---|---|---|---|---|---|",
    ]
    for policy in policies:
        if policy.name in refused:
            lines.append(f"| `{policy.name}` | | not measured: {refused[policy.name]} | | | |")
            continue
        found = [costs[policy.name][cached] for cached in whole]
        cpu = " / ".join(f"{1e6 * median(cost.cpu):.0f}" for cost in found)
        shares = [_share(c, step).value for c, step in zip(found, whole.values(), strict=True)]
        over = " (over)" if max(shares) > _bound(policy) else ""
        share = " / ".join(f"{s:.1%}" for s in shares) + over
        reserved = " / ".join(str(cost.reserved) for cost in found)
        lines.append(
            f"| `{policy.name}` | {_slack(policy)} | {cpu} | {share} | {reserved}"
            f" | {found[0].room} |"
        )
    return "\n".join(lines) + "\n"


def _results(
    costs: dict[str, dict[int, Cost]], whole: dict[int, float], made_with: str
) -> dict[str, Any]:
    """What `costs.write_costs` takes."""
    return {
        "made_with": made_with,
        "policies": {
            name: {
                "cpu_us_per_token": {str(c): 1e6 * median(cost.cpu) for c, cost in found.items()},
                "share_of_step": {str(c): _share(k, whole[c]).value for c, k in found.items()},
                "bytes_per_sequence": {str(c): cost.reserved for c, cost in found.items()},
            }
            for name, found in costs.items()
        },
    }


def _with_rows(readme: str, table: str) -> str:
    """The README with the rows of `table` in place of, or beside, those of its own."""
    before, rest = readme.split(BEGIN)
    shown, after = rest.split(END)
    head = table[: table.index(ROW)]
    rows = {
        line.split("`")[1]: f"{line}\n"
        for line in (shown + table).splitlines()
        if line.startswith(ROW)
    }
    return before + BEGIN + head + "".join(rows[name] for name in sorted(rows)) + END + after


def _processor() -> str:
    """What the machine calls its processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "an unknown processor"
