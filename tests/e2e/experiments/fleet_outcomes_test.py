"""Three replicas behind Envoy with one PostgreSQL: one after the other is killed while clients ask, and tell what
their answers were worth."""

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

from envoy_proxy import Envoy
from epikv import Client
from epikv.testing import Daemon
from shell import free_ports
from waiting import eventually

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import recorded
from recorded import Ledger, Traffic

CLIENTS = 6


def test_every_acknowledged_outcome_is_there(sample_model: Path, tmp_path: Path) -> None:
    ledger, numbers = Ledger(), itertools.count()
    with ExitStack() as stack:
        store = stack.enter_context(recorded.store("postgres", tmp_path))

        def start(name: str, address: str) -> Daemon:
            flags = (f"--listen={address}", f"--experiment_store={store.where}")
            spool = f"--experiment_spool={tmp_path / name}"
            daemon = Daemon(sample_model, "--threads=1", *flags, spool).__enter__()
            stack.callback(daemon.kill)
            return daemon

        ports = free_ports("a", "b", "c")
        addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        daemons = {name: start(name, address) for name, address in addresses.items()}
        envoy = stack.enter_context(Envoy(tmp_path / "envoy", [*addresses.values()]))
        client = stack.enter_context(Client(envoy.address))
        envoy.await_serving(client)
        recorded.begin(client)
        for name, address in addresses.items():
            # All of them may have been at the one that is killed.
            with Traffic(
                envoy.address, ledger, clients=CLIENTS, numbers=numbers, goes_on=True
            ) as traffic:
                traffic.until_more("written", 60)
                daemons[name].kill()
                written = len(ledger.written)
                eventually(lambda written=written: len(ledger.written) >= written + 20)
                # A client may meet it again before Envoy has seen that it is gone.
                assert len(traffic.failures) <= 2 * CLIENTS
            daemons[name] = start(name, address)
            eventually(lambda address=address: address in envoy.healthy())
        for daemon in daemons.values():
            recorded.await_empty_spool(daemon.metrics)
        died = recorded.tell_again(envoy.address, ledger)
        assert len(died) <= 3 * 2 * CLIENTS, died  # with their daemon, a kill
        held = recorded.held(ledger, store)
        held.check(lost_requests=ledger.unheard)
        assert held.outcomes >= len(ledger.acknowledged) >= 3 * 80
        assert recorded.reported(client) == held.outcomes
