"""`epikv traces`"""

import logging
import signal
from pathlib import Path

import click

from epikv.installing import pip_install


@click.command("traces")
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--endpoint",
    metavar="URL",
    help="Of a collector's OTLP over HTTP, such as http://127.0.0.1:4318."
    " [default: $OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318]",
)
@click.option("--follow", is_flag=True, help="Go on as the log grows, also into its next file.")
@click.option(
    "--share",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Of traces that begin at the daemon. Whether others are sampled, their callers say.",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keeps the place in the log, to go on from there the next time.",
)
@click.option("--service", default="epikvd", show_default=True, help="service.name of the spans.")
def command(
    log: Path, endpoint: str | None, follow: bool, share: float, state: Path | None, service: str
) -> None:
    """Ship the calls of an access log to OpenTelemetry's collector, as spans.

    LOG is the file of epikvd's setting access_log. Each call is a span in its caller's trace; below it are
    its queue, prefill and decode, with rounds of eviction as events. The daemon waits for none of this.
    While the collector is away nothing is skipped.
    """
    try:
        from epikv.traces.log_file import LogFile
        from epikv.traces.shipping import Shipper
    except ImportError as error:
        raise click.ClickException(f"{error}; install it: {pip_install('traces')}") from error
    logging.basicConfig(format="epikv traces: %(message)s")
    # It tells of each try, with a stack.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    file = LogFile(log, state)
    try:
        shipper = Shipper(file, endpoint, share, service)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: shipper.stop())
        shipper.run(follow=follow)
    finally:
        file.close()
    told = shipper.shipped
    click.echo(
        f"{told.calls} calls as {told.spans} spans; {told.left_out} not sampled,"
        f" {told.damaged} lines damaged",
        err=True,
    )
