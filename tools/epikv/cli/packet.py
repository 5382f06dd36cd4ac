"""`epikv packet`: K and V that one request has cached, for others to begin with."""

from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table

from epikv.cli import options, show
from epikv.client import Client
from epikv.options import Stop


@click.group("packet")
def group() -> None:
    """Keep what a prompt has cached, for other requests to begin with (generate --packet ID)."""


@group.command("create")
@click.argument("prompt", required=False)
@click.option("--file", type=options.text_file, help="Read the prompt from here; - is stdin.")
@click.option("--ids", is_flag=True, help="The prompt is token ids, separated by spaces.")
@click.option(
    "--soft-tokens", is_flag=True, help="Between the tokens that `epikv calibrate packet` trained."
)
@click.option(
    "-n",
    "--max-output-tokens",
    type=int,
    help="Go on for so many tokens, which are a part of it but for the last; default: the prompt alone.",
)
@options.kv
@options.packets
@options.scheduling
@click.option("--timeout", type=float, help="Seconds.")
@options.model
@options.server
@options.as_json
def create(
    prompt: str | None,
    file: Path | None,
    ids: bool,
    server: str,
    as_json: bool,
    max_output_tokens: int | None,
    **given: Any,
) -> None:
    """Cache PROMPT (or --file, or stdin) and print the id of the packet."""
    kv, scheduling = options.take_kv(given), options.take_scheduling(given)
    with Client(server) as client:
        made = client.create_packet(
            options.read_prompt(prompt, file, ids),
            kv=kv,
            scheduling=scheduling,
            stop=Stop(max_output_tokens=max_output_tokens),
            **given,
        )
    if as_json:
        show.json_line("packet", made)
        return
    assert made.packet is not None and made.result is not None
    show.err.print(f"{made.packet.tokens} tokens, {made.packet.bytes} bytes")
    if max_output_tokens is not None:
        show.err.print(made.result.text, markup=False)
    show.out.print(made.packet.id)


@group.command("list")
@click.option("--tenant", default="", help="Whose; default: the caller's own.")
@options.model
@options.server
@options.as_json
def list_packets(tenant: str, model: str, server: str, as_json: bool) -> None:
    """List the packets, the newest first."""
    with Client(server) as client:
        found = client.packets(model=model, tenant=tenant)
    if as_json:
        for packet in found:
            show.json_line("packet", packet)
        return
    table = Table(Column("packet", no_wrap=True), "model", "tokens", "kept", "bytes", "made")
    for packet in found:
        table.add_row(
            packet.id,
            packet.model,
            str(packet.tokens),
            f"{packet.kept_tokens:g}",
            str(packet.bytes),
            f"{packet.create_time:%Y-%m-%d %H:%M}" if packet.create_time else "",
        )
    show.out.print(table)


@group.command("delete")
@click.argument("packet_ids", nargs=-1, required=True, metavar="ID...")
@click.option("--tenant", default="", help="Whose; default: the caller's own.")
@options.server
def delete(packet_ids: tuple[str, ...], tenant: str, server: str) -> None:
    """Delete packets by their ids."""
    with Client(server) as client:
        for packet_id in packet_ids:
            client.delete_packet(packet_id, tenant=tenant)
