"""`epikv token`"""

import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta

import click

ROLES = ("user", "operator", "experimenter")


@click.command("token")
@click.argument("name")
@click.argument("role", type=click.Choice(ROLES))
@click.option("--days", type=click.IntRange(1, 36500), help="It expires after so many.")
def command(name: str, role: str, days: int | None) -> None:
    """Make a token for NAME.

    Its line for epikvd's auth_tokens_file goes to stdout, the token itself to stderr. The token is
    kept nowhere: the file has only its digest. NAME may have several: add the new one, give it to
    those who use the old one, then delete the old line."""
    if not re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", name):
        raise click.ClickException(
            f"the name must be 1 to 64 letters, digits, '.', '_', '-' and '@', is '{name}'"
        )
    token = f"epikv-{secrets.token_urlsafe(32)}"
    click.echo(f"token of {name}, shown this once: {token}", err=True)
    line = f"{role} {name} {hashlib.sha256(token.encode()).hexdigest()}"
    if days is not None:
        until = datetime.now(UTC) + timedelta(days=days)
        line += f" until={until:%Y-%m-%dT%H:%M:%SZ}"
    click.echo(line)
