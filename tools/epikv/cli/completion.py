"""`epikv completion`"""

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete epikv's commands and options.

    \b
        bash: eval "$(epikv completion bash)"      in ~/.bashrc
        zsh:  eval "$(epikv completion zsh)"       in ~/.zshrc
        fish: epikv completion fish | source       in ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None  # click knows these shells
    root = context.find_root()
    click.echo(made(root.command, {}, "epikv", "_EPIKV_COMPLETE").source())
