"""`epikv token`"""

import hashlib
import re
import secrets

import click

ROLES = ("user", "operator", "experimenter")


@click.command("token")
@click.argument("name")
@click.argument("role", type=click.Choice(ROLES))
def command(name: str, role: str) -> None:
    """Make a token for NAME.

    Its line for epikvd's auth_tokens_file goes to stdout, the token itself to stderr. The token is
    kept nowhere: the file has only its digest."""
    if not re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", name):
        raise click.ClickException(
            f"the name must be 1 to 64 letters, digits, '.', '_', '-' and '@', is '{name}'"
        )
    token = f"epikv-{secrets.token_urlsafe(32)}"
    click.echo(f"token of {name}, shown this once: {token}", err=True)
    click.echo(f"{role} {name} {hashlib.sha256(token.encode()).hexdigest()}")
