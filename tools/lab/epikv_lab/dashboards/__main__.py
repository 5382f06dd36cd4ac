"""`python -m epikv_lab.dashboards`: writes the dashboards of deploy/grafana, and draws them."""

import time
from pathlib import Path

import click

from epikv_lab.dashboards.reading import File, Prometheus, Reader, Refused

FILES = sorted((Path(__file__).parents[4] / "deploy" / "grafana").glob("*.json"))


@click.group()
def main() -> None:
    """Dashboards of epikvd for Grafana."""


@main.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def write(folder: Path) -> None:
    """Write each dashboard to FOLDER, as JSON that Grafana imports."""
    from epikv_lab.dashboards import grafana
    from epikv_lab.dashboards.all import ALL

    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in ALL:
        path = folder / f"{dashboard.name}.json"
        path.write_text(grafana.to_json(dashboard))
        click.echo(path)


@main.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--prometheus", default="http://127.0.0.1:9090", show_default=True, help="Its address."
)
@click.option("--minutes", default=60.0, show_default=True, help="How much of the past is shown.")
@click.option(
    "--rate-seconds",
    default=60.0,
    show_default=True,
    help="What rates are taken over: four scrapes.",
)
@click.option("--row", "rows", multiple=True, help="A row's title, for a part of a dashboard.")
@click.option(
    "--out", default=Path(), type=click.Path(file_okay=False, path_type=Path), help="A folder."
)
def draw(
    files: tuple[Path, ...],
    prometheus: str,
    minutes: float,
    rate_seconds: float,
    rows: tuple[str, ...],
    out: Path,
) -> None:
    """Draw dashboards, FILES of JSON or all of deploy/grafana, from what a Prometheus has."""
    from epikv_lab.dashboards.picture import draw as draw_picture

    out.mkdir(parents=True, exist_ok=True)
    end = time.time()
    for path in files or FILES:
        file = File(path)
        picture = out / f"{file.name}.png"
        try:
            reader = Reader(file, Prometheus(prometheus), end - 60 * minutes, end, rate_seconds)
            draw_picture(file, reader, picture, rows)
        except Refused as error:
            raise click.ClickException(str(error)) from error
        click.echo(picture)


if __name__ == "__main__":
    main(prog_name="python -m epikv_lab.dashboards")
