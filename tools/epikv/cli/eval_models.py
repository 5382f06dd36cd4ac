"""A sample model's folder, as evaluations serve it: exported, with what its policies need."""

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from epikv import harness
from epikv.sample.vocabulary import END_THINK, THINK

if TYPE_CHECKING:
    from epikv.sample.need import Need

STEERING = "steering"
SHIPPED = "artefacts"  # of a model's folder: what takes long to make, and what is loaded as it is
# What `epikv calibrate` makes an artefact of when it is asked for, and what it is told.
CALIBRATED: dict[str, tuple[str, ...]] = {
    "duo_attention": (),
    "epikv_probe": ("--after", THINK),
    "headkv": (),
    # Away from checking what was just found.
    STEERING: ("--mark=check", "--sentence-end=.", f"--begin={THINK}", f"--end={END_THINK}"),
    "thinkv_tbe": (),
    "triattention": (),
}
CALIBRATION_PROBLEMS = 24
# Files of a folder that make up what is exported.
_SOURCES = (
    "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
    "calibration.json",
)  # fmt: skip


def exported(directory: Path) -> Path:
    """The model as the quickstart has it: in float32, with its calibration."""
    from epikv.export import ExportError, export

    sources = [directory / name for name in _SOURCES if (directory / name).exists()]
    path = harness.cached(directory.name, {"dtype": "float32"}, sources)
    if not path.exists():
        harness.say(f"exporting {directory}")
        try:
            export(directory, path, dtype="float32", name=directory.name)
        except ExportError as error:
            raise click.ClickException(str(error)) from error
    return path


def artefacts(directory: Path, policies: Collection[str]) -> Path | None:
    """A folder of what is shipped with the model, and of what `epikv calibrate` measures of it for
    these policies, over solved problems of a set of its own, as many of each family. None if there
    is nothing.

    What a model does not give is told once; the daemon then refuses the policy.
    """
    from epikv.cli.calibrate import group
    from epikv.sample.families import FAMILIES, problem

    model = exported(directory)
    folder = model.with_suffix(".artefacts")
    folder.mkdir(exist_ok=True)
    for shipped in (directory / SHIPPED).glob("*"):
        shutil.copy(shipped, folder)
    for policy in sorted(set(CALIBRATED).intersection(policies)):
        out = folder / f"{policy}.json"
        failed = out.with_suffix(".failed")
        if out.exists() or failed.exists():
            continue
        harness.say(f"calibrating {policy}")
        command = [policy, str(model), "-o", str(out), *CALIBRATED[policy]]
        with tempfile.TemporaryDirectory() as texts:
            for number in range(CALIBRATION_PROBLEMS):
                family = list(FAMILIES)[number % len(FAMILIES)]
                task = problem(f"calibrate/{number}", family)
                text = Path(texts) / f"{number}.txt"
                text.write_text(f"{task.prompt} {task.trace}")
                command += ["--text", str(text)]
            try:
                group.main(command, standalone_mode=False)
            except click.ClickException as error:
                harness.say(f"{policy}: {error.message}")
                failed.write_text(f"{error.message}\n")
    return folder if any(folder.glob("*.json")) else None


def needs(directory: Path) -> "dict[str, Need]":
    """What the model was measured to need, by family; of a folder without need.json, nothing."""
    from epikv.sample.need import FILE, load

    return load(directory) if (directory / FILE).exists() else {}
