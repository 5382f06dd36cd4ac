"""`epikv calibrate headkv` and `duo_attention`: how much each head looks up far back."""

from pathlib import Path

import click

from epikv.cli import calibrate_sources as sources


def _command(policy: str) -> click.Command:
    @click.command(policy)
    @sources.with_options(
        *sources.SOURCES,
        sources.out(),
        sources.length(),
        click.option(
            "--gap",
            default=64,
            show_default=True,
            type=click.IntRange(1),
            help="Tokens back from which on a token counts as far; about the recent window.",
        ),
    )
    def command(
        model: Path,
        texts: tuple[Path, ...],
        tasks: tuple[str, ...],
        problems: int,
        out: Path,
        length: int,
        gap: int,
    ) -> None:
        """Measure how much of what MODEL says each of its heads looks up far back.

        headkv and duo_attention take the same scores, each from a file of its own."""
        source = sources.load_texts(model, texts, tasks, problems, length)
        from epikv.calibrate import artefacts
        from epikv.calibrate import head_profile as calibration
        from epikv.eval.progress import progress

        try:
            artefacts.check(source.manifest)
            with progress(len(source.ids), 0, "texts") as tell:
                found = calibration.measure(source.module, source.manifest, source.ids, gap, tell)
            artefacts.write(
                out,
                policy,
                source.manifest,
                data={"scores": found.scores.tolist()},
                made_with={"texts": len(source.ids), "tokens": found.tokens, "gap": gap},
            )
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        by_layer = "; ".join(
            " ".join(f"{score:.3f}" for score in heads) for heads in found.scores.tolist()
        )
        click.echo(f"looked up of {found.tokens} tokens, by layer and KV head: {by_layer}")

    return command


COMMANDS = [_command(policy) for policy in ("headkv", "duo_attention")]
