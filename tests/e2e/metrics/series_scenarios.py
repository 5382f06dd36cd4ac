"""Groups of calls to a daemon, each with the series that it moves: see series_families.py."""

import time
from functools import partial
from io import SEEK_END
from itertools import count

import grpc
import pytest
from credentials import replace
from epikv import (
    Accepted,
    Chat,
    Client,
    Delta,
    Kv,
    Output,
    RpcError,
    Sampling,
    Session,
    Speculation,
    Stop,
)
from epikv.connection import connect
from epikv.sample import problem
from epikv.testing import PACED
from epikv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    config_pb2,
    experiment_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from google.protobuf import text_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc
from series_families import PRIORITIES
from series_world import MUCH, PROMPT, World, refused

TASK = problem(9)
HELLO = Chat([{"role": "user", "content": "hello"}])
CONTEXT, TASK_TOKENS = 1280, 114
TOKEN_BYTES = 3080  # of the sample model
SESSION_BYTES = 4_000_000
POOL_BYTES, SMALL_POOL = 2900 * TOKEN_BYTES, 1000 * TOKEN_BYTES

# Both arms evict; of 120 tokens each keeps less. Their outcomes stop it.
DEFINITION = """
    name: "lean" traffic_permille: 1000
    arms { name: "wide" weight_permille: 500 control: true kv { policy: "sliding" max_tokens: 100 } }
    arms { name: "narrow" weight_permille: 500 kv { policy: "sliding" max_tokens: 80 } }
    metrics { name: "right" kind: KIND_PROPORTION }
    metrics { name: "score" }
    primary_metric: "right"
    guardrails { metric: "right" margin: 0.1 }
"""


def load(world: World) -> None:
    """A model beside the first, which is asked for too early, and one that is damaged."""
    path, damaged = world.files.model, world.files.damaged
    source = config_pb2.ModelSource(path=str(path), name="b", kv_pool_bytes=SMALL_POOL)
    loading = world.admin.LoadModel.future(admin_pb2.LoadModelRequest(source=source))
    reason = ""
    while reason != "LOADING":  # NOT_FOUND, as long as the load has not begun
        with pytest.raises(RpcError) as early:
            world.client.generate_once([1], model="b")
        reason = early.value.reason
    loading.result()
    weights = bytearray(path.read_bytes())
    weights[len(weights) // 2] ^= 0x10
    damaged.write_bytes(weights)
    source = config_pb2.ModelSource(path=str(damaged), name="c", kv_pool_bytes=SMALL_POOL)
    with pytest.raises(grpc.RpcError) as caught:
        world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


def probed(world: World) -> None:
    """What probes and grpcurl ask gRPC's own services on both ports."""
    for address in (world.daemon.grpc, world.daemon.admin):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "liveness", "models/sample"):
                health.Check(health_pb2.HealthCheckRequest(service=name))
            watch = health.Watch(health_pb2.HealthCheckRequest())
            next(watch)
            watch.cancel()
            reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            next(channel.stream_stream(reflection)(iter([b"\x3a\x00"]), timeout=10))
    world.look()


def policies(world: World) -> None:
    """Each policy once over its budget, every way to end well, scoring, a constraint, guesses."""
    client = world.client
    ask = partial(client.generate_once, PROMPT, model="sample")
    long = Stop(120, min_output_tokens=120, ignore_eos=True)
    for policy in client.policies(model="sample"):
        small = {"slack": 4, "window": 16, "prefer": [1]}
        params = {p.name: small[p.name] for p in policy.params if p.name in small}
        ask(kv=Kv("full") if policy.name == "full" else Kv(policy.name, 100, params), stop=long)
    client.generate_once(
        TASK.prompt, model="sample", kv=Kv("sliding", 64, protect_prompt=False), stop=Stop(2)
    )
    text = client.generate_once(TASK.prompt, model="sample", output=Output(token_ids=True))
    assert text.summary is not None
    ends = [("end", Stop())]
    ends += [("stop_string", Stop(stop_strings=[text.text[:3]]))]
    ends += [("stop_token", Stop(stop_token_ids=[text.token_ids[0]]))]
    for reason, stop in ends:
        client.generate_once(TASK.prompt, model="sample", stop=stop)
        world.look()
        assert world.value("epikv_requests_finished_total", reason=reason) > 0, reason
    client.score(TASK.prompt, TASK.trace, model="sample")
    client.generate_once(HELLO, model="sample", stop=Stop(2))
    ask(sampling=Sampling(regex="[0-9 ]+"), stop=Stop(2))
    # Some guesses come true, and some do not.
    client.generate_once(TASK.prompt, model="sample", stop=Stop(200), speculation=Speculation())
    for _ in range(20):  # while rows seem dear, as beside other work, nothing is drafted
        ask(stop=Stop(200, ignore_eos=True), speculation=Speculation("draft"))
        world.look()
        if world.value("epikv_step_seconds_total", stage="draft") > 0:
            break
    for _ in range(2):  # a prompt that is known when it comes again
        client.generate_once([5] * 300, model="sample", stop=Stop(1))
    # A prompt beside a stream that decodes.
    with client.generate(PROMPT, model="sample", stop=Stop(900, min_output_tokens=900)) as stream:
        while not isinstance(next(stream), Delta):
            pass
        ask(stop=Stop(1))
        stream.cancel()


def tier(world: World) -> None:
    """What is evicted is fetched, in doubt as well, comes back, and is forgotten."""
    for kv in (
        Kv("h2o", 64, tier_tokens=64, tier_fetch=16),
        Kv("h2o", 64, tier_tokens=64, tier_fetch=64, tier_doubt=1e-9),
        Kv("h2o", 64, tier_tokens=16, guard=8),
    ):
        stop = Stop(120, min_output_tokens=120, ignore_eos=True)
        with world.client.generate(PROMPT, model="sample", kv=kv, stop=stop) as stream:
            while not isinstance(next(stream), Delta):
                pass
            world.look()
            list(stream)


def packets(world: World) -> None:
    """What one prompt has cached stands before another; and is deleted."""
    made = world.client.create_packet(TASK.prompt, model="sample").packet
    assert made is not None
    world.client.generate_once("1", packets=[made.id], model="sample", stop=Stop(2))
    assert [each.id for each in world.client.packets()] == [made.id]
    world.look()
    refused("packets_full", lambda: world.client.create_packet([5] * 900, model="sample"))
    world.client.delete_packet(made.id)


def sessions(world: World) -> None:
    """A conversation that is short, that is long, that goes on, and one that outgrows its room."""
    ask = partial(world.client.generate_once, model="sample", stop=Stop(1))
    for tokens in (40, 400, 410):
        ask([5] * tokens, session=Session("one", 64))
        if tokens == 400:
            world.until("epikv_session_updates_total", 1, result="done")
    [model] = (model for model in world.client.models() if model.name == "sample")
    row = 16 * (model.kv_bytes_per_token + 8 * model.layers * model.kv_heads + 4) + 4
    budget = (SESSION_BYTES - 16 * 4 * model.hidden_size) // row
    ask([5] * 1100, session=Session("two", budget, episodes=16))
    world.until("epikv_session_updates_total", 1, result="failed")


def refusals(world: World) -> None:
    ask = partial(world.client.generate_once, TASK.prompt, model="sample")
    refused("invalid_request", lambda: world.client.generate_once("", model="sample"))
    refused("token_range", lambda: world.client.generate_once([10**6], model="sample"))
    refused("span_range", lambda: ask(kv=Kv("sliding", 300, protected_spans=[(5, 2000)])))
    refused("context_length", lambda: world.client.generate_once([5] * 2000, model="sample"))
    refused("kv_budget", lambda: ask(kv=Kv("sliding", 100, protect_prompt=True)))
    refused(
        "prompt_evicted", lambda: ask(kv=Kv("sliding", 64), output=Output(prompt_logprobs=True))
    )
    refused("kv_pool_too_small", lambda: ask(model="b", stop=Stop(CONTEXT - TASK_TOKENS)))
    refused("kv_tier_too_small", lambda: ask(kv=Kv("sliding", 100, tier_tokens=900)))
    refused("artefact_missing", lambda: ask(model="b", kv=Kv("triattention", 300)))
    refused("not_found", lambda: ask(model="nosuch"))
    refused("not_found", lambda: world.client.cancel("nosuch"))
    soon = Stop(900, min_output_tokens=900)
    request = generation_pb2.GenerateRequest(
        model="sample", token_ids={"ids": PROMPT}, stop=soon.to_proto()
    )
    with pytest.raises(grpc.RpcError) as caught:
        with connect(world.daemon.grpc, token=world.token) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stub.GenerateOnce(request, metadata=[("grpc-timeout", "30m")])
    assert RpcError.from_grpc(caught.value).reason == "DEADLINE_INFEASIBLE"
    with connect(world.daemon.grpc, token=world.token) as channel:
        send = channel.unary_unary("/epikv.v1.GenerationService/GenerateOnce")
        text = generation_pb2.GenerateRequest(model="sample", text="??").SerializeToString()
        for reason, message in (
            ("NOT_UTF8", text.replace(b"??", b"\xff\xfe")),
            ("MALFORMED", b"\x0a\xff\xff"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                send(message)
            assert RpcError.from_grpc(caught.value).reason == reason
        # Of several models, of which this dialect's requests name none; but for an Abort of nothing.
        methods = ("Generate", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads")
        for method in (*methods, "GetTokenizer"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{method}")(b"")
            assert RpcError.from_grpc(caught.value).reason == "INVALID_REQUEST"
        assert channel.unary_unary("/vllm.grpc.engine.VllmEngine/Abort")(b"") == b""
        watched = channel.unary_stream("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics")(b"")
        assert next(watched)
        watched.cancel()
    with Client(world.daemon.grpc, token="unknown" * 8) as stranger:
        refused("unauthenticated", stranger.models)
    with connect(world.daemon.admin, token=world.user) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def crowd(world: World) -> None:
    """Places, room and queue are taken, at every priority; clients read slowly, late or no more."""
    # Room for three: the fourth waits for KV.
    big = world.running(900, 900, 900)
    waiting = [world.hold(900, priority, f"waits {priority}") for priority in PRIORITIES]
    world.until("epikv_requests_waiting", 3, reason="kv")
    refused("duplicate_id", lambda: list(world.hold(900, request_id="waits low")))
    refused("queue_full", lambda: list(world.hold(900)))
    world.leave(*waiting, *big)

    # Four places.
    some = [*world.running(700), *world.running(700, 700, 700, priorities=PRIORITIES)]
    waiting = [world.hold(700, priority) for priority in PRIORITIES]
    world.until("epikv_requests_waiting", 3, reason="running")
    # What was not read in time stood still, and goes on.
    list(some.pop())
    world.leave(*waiting, *some)

    # The third is in the way of the fourth.
    first, second, third = world.running(700, 900, 700)
    second.cancel()
    world.until("epikv_requests_running", 2)
    world.leave(first, third, *world.running(950))


def late(world: World) -> None:
    """Deadlines that pass, of what runs and of what waits, and a cancel by somebody else."""
    (held,) = world.running(900)
    accepted = next(held)
    assert isinstance(accepted, Accepted)
    world.client.cancel(accepted.request_id)
    world.until("epikv_requests_running", 0)
    stop = Stop(900, min_output_tokens=900, ignore_eos=True)
    request = generation_pb2.GenerateRequest(
        model="sample",
        token_ids={"ids": PROMPT},
        stop=stop.to_proto(),
        output=MUCH.to_proto(),
    )
    with connect(world.daemon.grpc, PACED, token=world.token) as channel:
        # The server's deadline alone: the client's library knows of none.
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        places = world.running(700, 700, 700, 700)
        dropped = stub.Generate(request, metadata=[("grpc-timeout", "4000m")])
        world.until("epikv_requests_waiting", 1, reason="running")
        # Nothing can run: the engine looks at the queue when it is asked for something.
        queued = admin_pb2.ActiveRequest.STATE_QUEUED
        ask = admin_pb2.ListActiveRequestsRequest()
        while any(r.state == queued for r in world.admin.ListActiveRequests(ask).requests):
            pass
        world.leave(*places)
        ended = stub.Generate(request, metadata=[("grpc-timeout", "3000m")])
        world.until("epikv_requests_running", 1)
        world.until("epikv_requests_running", 0)
        del dropped, ended  # which would cancel them


def broken(world: World) -> None:
    """A forward that fails its request, and a model that this build cannot run."""
    source = config_pb2.ModelSource(path=str(world.files.odd), name="odd", kv_pool_bytes=1000000)
    world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    refused("chat_format", lambda: world.client.generate_once(HELLO, model="odd"))
    refused("internal", lambda: world.client.generate_once([1, 8, 3], model="odd"))
    world.until("epikv_requests_finished_total", 1, reason="error")
    world.admin.UnloadModel(admin_pb2.UnloadModelRequest(name="odd"))
    source.path = str(world.files.unreadable)
    with pytest.raises(grpc.RpcError) as caught:
        world.admin.LoadModel(admin_pb2.LoadModelRequest(source=source))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def operate(world: World) -> None:
    admin, client = world.admin, world.client
    admin.GetServerStatus(admin_pb2.GetServerStatusRequest())
    admin.GetLoad(admin_pb2.GetLoadRequest())
    admin.ListActiveRequests(admin_pb2.ListActiveRequestsRequest())
    admin.GetConfig(admin_pb2.GetConfigRequest())
    admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    admin.DumpState(admin_pb2.DumpStateRequest())
    admin.UpdateConfig(
        admin_pb2.UpdateConfigRequest(
            config=config_pb2.ServerConfig(default_max_output_tokens=7),
            update_mask=FieldMask(paths=["default_max_output_tokens"]),
        )
    )
    admin.Drain(admin_pb2.DrainRequest())
    world.look()
    refused("draining", lambda: client.generate_once(PROMPT, model="sample"))
    admin.Resume(admin_pb2.ResumeRequest())
    # What runs on a model that goes ends with it; the one before it, which keeps its name's series,
    # has as long as it takes.
    source = config_pb2.ModelSource(path=str(world.files.model), name="b", kv_pool_bytes=SMALL_POOL)
    before = world.hold(900, model="b")
    world.until("epikv_requests_running", 1, model="b")
    admin.LoadModel(admin_pb2.LoadModelRequest(source=source, replace=True))
    ended = world.hold(900, model="b")
    world.until("epikv_requests_running", 2, model="b")
    admin.UnloadModel(admin_pb2.UnloadModelRequest(name="b", grace=Duration()))
    world.until("epikv_requests_finished_total", 1, reason="drained")
    ended.cancel()
    before.cancel()


def introspect(world: World) -> None:
    client = world.client
    assert client.detokenize(client.tokenize("1 + 1", model="sample"), model="sample")
    client.apply_chat_template(HELLO, model="sample")
    client.model(client.models()[0].name)
    client.tokenizer_json(model="sample")
    client.policy(client.policies(model="sample")[0].name, model="sample")


def reload(world: World) -> None:
    """A tokens file that is wrong: who looks at it is a thread of the daemon."""
    right = world.files.tokens.read_text()
    replace(world.files.tokens, "root eve 00\n")
    world.until("epikv_auth_reload_failures_total", 1)
    replace(world.files.tokens, right)


def start_lean(world: World) -> None:
    client = world.experimenter
    client.create_experiment(text_format.Parse(DEFINITION, experiment_pb2.Experiment()))
    draft = client.experiment("lean")
    client.start_experiment("lean", etag=draft.etag)
    refused("etag", lambda: client.update_experiment(draft))


def experiment(world: World) -> None:
    """Requests take part, or do not, and what they turned out to be worth is recorded."""
    start_lean(world)
    arms: dict[str, str] = {}
    while len({*arms.values()}) < 2:
        name = f"unit {len(arms)}"
        arms[name] = world.take_part(name)
    assert {*arms.values()} == {"lean/wide", "lean/narrow"}
    assert world.take_part("forced", force_arm="lean/wide") == "lean/wide"
    assert world.take_part("left out", opt_out=True) == "none"

    record = world.record
    record("unit 0", "right", 1)
    record("unit 0", "right", 1)
    refused("outcome_conflict", lambda: record("unit 0", "right", 0))
    refused("not_found", lambda: record("nosuch", "right", 1))
    refused("invalid_request", lambda: record("unit 0", "wrong", 1))
    refused("invalid_request", lambda: record("a\0b", "score", 1))  # which no store can hold
    world.experiments.BatchRecordOutcomes(
        experiment_pb2.BatchRecordOutcomesRequest(
            outcomes=[{"request_id": "unit 0", "metric": "score", "value": 1}]
        )
    )
    for window, late in ((Duration(nanos=1000), True), (Duration(seconds=3600), False)):
        world.experimenter.update_experiment(
            experiment_pb2.Experiment(name="lean", outcome_window=window), mask=["outcome_window"]
        )
        if late:
            refused("outcome_late", lambda: record("unit 0", "score", 1, "late"))

    [known] = world.experiments.ListExperiments(experiment_pb2.ListExperimentsRequest()).experiments
    world.experiments.GetExperimentReport(
        experiment_pb2.GetExperimentReportRequest(name=known.name)
    )
    world.experiments.PlanExperiment(
        experiment_pb2.PlanExperimentRequest(kind="KIND_PROPORTION", rate=0.1, effect=0.03)
    )


def set_switchback(world: World, switchback: experiment_pb2.Switchback | None) -> None:
    world.experimenter.update_experiment(
        experiment_pb2.Experiment(name="lean", switchback=switchback),
        mask=["switchback"],
        allow_rebucket=True,
    )


def switch(world: World) -> None:
    """The whole server is on one arm, and in a wash-out until the day's last millisecond."""
    day, most = Duration(seconds=86400), Duration(seconds=86399, nanos=999_000_000)
    set_switchback(world, experiment_pb2.Switchback(window=day, wash_out=most))
    assert world.take_part("washed out").startswith("lean/")


def shadow(world: World) -> None:
    """Finished requests are replayed, but for those that newer ones displace while something is
    live, and one that live ones always interrupt."""
    requests, waiting = (
        f"epikv_experiment_shadow_{of}" for of in ("requests_total", "waiting_requests")
    )
    compared = world.value(requests, outcome="compared")
    held = world.hold(900)
    world.until("epikv_requests_running", 1)
    number = count()
    while not world.value(requests, outcome="displaced"):
        for _ in range(16):  # a look takes longer than all of them
            world.take_part(f"waiting {next(number)}", tokens=2)
        world.look()
    world.leave(held)
    world.until(waiting, 0)
    world.look()
    assert world.value(requests, outcome="compared") > compared

    while not world.value(requests, outcome="interrupted"):
        world.take_part(f"interrupted {next(number)}", tokens=900)
        for _ in range(12):  # more often than such a replay takes, and than it is tried
            time.sleep(0.1)
            world.client.generate_once(PROMPT, model="sample", stop=Stop(2))
        world.look()
    world.until(waiting, 0)


def outage(world: World) -> None:
    """Nobody can write to the store of experiments, and then they can again."""
    bytes_, damaged = "epikv_experiment_spool_bytes", "epikv_experiment_spool_damaged_bytes_total"
    # A disk changes the last record, which a replay under way may have read before.
    with world.store_away():
        assert world.record("unit 0", "score", 1, key="spooled")
        assert world.record("unit 0", "score", 1, key="kept")
        assert world.record("unit 0", "score", 1, key="lost")
        world.until_more(bytes_)
        [segment] = world.files.spool.glob("*.spool")
        with segment.open("r+b") as file:
            file.seek(-1, SEEK_END)
            last = file.read(1)
            file.seek(-1, SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        world.look()  # a try that ends after this one
        world.until_more("epikv_experiment_store_outage_seconds_total")
    world.until_more(damaged)
    world.until(bytes_, 0)

    # Until there is no room for one more outcome, whose part of the spool is small; then for no request.
    with world.store_away():
        outcomes = [{"request_id": "nosuch", "metric": "score", "value": 1}] * 1000
        batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
        # At once, for each answer may wait for another try of the store, which takes 5 s.
        for asked in [world.experiments.BatchRecordOutcomes.future(batch) for _ in range(18)]:
            asked.result()
        while outcomes:
            batch = experiment_pb2.BatchRecordOutcomesRequest(outcomes=outcomes)
            results = world.experiments.BatchRecordOutcomes(batch).results
            if any(result.code for result in results):
                outcomes = outcomes[: len(outcomes) // 10]
        dropped = partial(world.value, "epikv_experiment_records_total", fate="dropped")
        world.look()
        before = dropped()
        for number in count():
            if number % 100 == 0:
                world.look()
                if dropped() > before:
                    break
            # Short, but for what is recorded of it.
            told = world.experimenter.generate_once(
                "7", stop=Stop(1), model="sample", request_id=f"{number:0128}"
            )
            assert told.accepted is not None and told.accepted.arm.startswith("lean/")
    world.until(bytes_, 0)
    spooled, replayed = (
        world.value("epikv_experiment_records_total", fate=fate) for fate in ("spooled", "replayed")
    )
    assert spooled - replayed == 1, "all come back but the one that the disk changed"


def breach(world: World) -> None:
    """The worse arm's guardrail stops the experiment, whose arms share the server again."""
    set_switchback(world, None)
    for number in count():
        name = f"worse {number}"
        arm = world.take_part(name, tokens=2)
        if arm == "none":
            break
        world.record(name, "right", float(arm == "lean/wide"))
    stopped = world.experimenter.stop_experiment("lean", reason="enough")
    assert stopped.stop_reason == "guardrail/right/narrow"
    world.until("epikv_experiments_running", 0)
    assert world.value("epikv_experiment_guardrail_breaches_total") == 1


def small(world: World) -> None:
    """No series for a policy, an arm or an experiment of its own; little patience with slow
    readers."""
    ask = partial(world.client.generate_once, PROMPT, model="sample")
    ask(kv=Kv("sliding", 80), stop=Stop(120, min_output_tokens=120, ignore_eos=True))
    start_lean(world)
    assert world.take_part("unit 0").startswith("lean/")
    world.until("epikv_experiments_running", 1)
    assert "epikv_experiment_assignments_total" not in world.page
    held = world.hold(900)
    world.until("epikv_requests_finished_total", 1, reason="slow_reader")
    held.cancel()


def idle(world: World) -> None:
    """Nobody asks for anything, but the daemon looks at its files and is scraped."""
    clock = "process_cpu_seconds_total"
    until = time.monotonic() + 2  # its own timers are of a second
    ticks = 0
    while ticks < 5 or time.monotonic() < until:
        before = world.value(clock)
        world.look()
        ticks += world.value(clock) > before


# What has stopped has series for ten minutes: it comes last.
SCENARIOS = (
    probed,
    load,
    policies,
    tier,
    packets,
    sessions,
    refusals,
    crowd,
    late,
    broken,
    introspect,
    reload,
    operate,
    experiment,
    shadow,
    switch,
    outage,
    breach,
)
