"""`python -m epikv.export.chat PATH...`: what chat formats templates and checkpoints have."""

from pathlib import Path

import click

from epikv.export.chat import derive, read, told

# Of a template without its checkpoint.
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(paths: tuple[Path, ...]) -> None:
    """Tell, a line each, what chat format becomes of PATHS: templates, or checkpoints' directories."""
    for path in paths:
        chat = read(path) if path.is_dir() else derive(path.read_text(encoding="utf-8"), _TOKENS)
        click.echo(f"{path}: {told(chat)}")


if __name__ == "__main__":
    main()
