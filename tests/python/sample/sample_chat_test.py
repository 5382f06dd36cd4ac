"""The sample model's chat template: all trainings have it, and it becomes a format."""

from pathlib import Path

import pytest
from epikv.export import chat
from epikv.sample.chat import TEMPLATE
from epikv_lab.sample.measure import folders

FOLDERS = folders()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_training_has_it(folder: Path) -> None:
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_it_becomes_a_format_that_says_what_it_refuses() -> None:
    formats = chat.read(FOLDERS[0])
    assert isinstance(formats, chat.ChatFormats)
    format = formats.default
    assert isinstance(format.system, chat.Refusal)
    assert "follows no instructions" in str(format.system)
    assert format.refuse["assistant"] == (("done #",),) and format.refuse["user"] == ()
    asked = [{"role": "user", "content": "#0 $a = 3 + 4 ask $a"}]
    assert format.render(asked, str) == "<bos> #0 $a = 3 + 4 ask $a <think>"
