"""Chat formats of checkpoints: which template is taken, and what the model file says of it."""

import json
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
from click.testing import CliRunner
from epikv.cli import main
from epikv.export import archive, chat, export
from epikv.export.chat import ChatFormats, Refusal, Ways
from epikv.export.chat.__main__ import main as tell
from epikv.export.synthetic import write_directory
from tiny_model import TINY
from tool_templates import HERMES
from transformers import AutoTokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a lane?"},
    {"role": "assistant", "content": "Rows of K and V."},
    {"role": "user", "content": "Whose?"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Hugging Face directory that exports, with no template."""
    write_directory(TINY, tmp_path / "hf", seed=3)
    return tmp_path / "hf"


def configure(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def rendered(formats: ChatFormats | Refusal) -> str:
    assert isinstance(formats, ChatFormats)
    return formats.default.render(CHAT, datetime.now().strftime)


def theirs(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


def test_a_model_file_holds_the_formats_of_its_template(directory: Path, tmp_path: Path) -> None:
    configure(
        directory,
        chat_template=templates.MISTRAL_V3,
        bos_token="<begin>",
        eos_token={"content": "<end>", "__type": "AddedToken", "special": True},
    )
    export(directory, tmp_path / "model.pt", check=False)
    formats = archive.read_chat(tmp_path / "model.pt")
    assert formats == chat.read(directory)
    assert rendered(formats) == theirs(directory)
    with zipfile.ZipFile(tmp_path / "model.pt") as file:
        [name] = [name for name in file.namelist() if name.endswith("extra/chat_template.json")]
        kept = json.loads(file.read(name))
    assert kept["template"] == templates.MISTRAL_V3, "for routers, which run it themselves"
    assert kept["special_tokens"]["eos_token"] == "<end>"
    assert rendered(formats) == (
        "<begin>[INST] What is a lane?[/INST] Rows of K and V.<end>[INST] Be brief.\n\nWhose?[/INST]"
    )


def test_special_tokens_that_only_the_class_knows_reach_the_template(directory: Path) -> None:
    write_directory(TINY, directory, architecture="Gemma2ForCausalLM")
    configure(directory, chat_template=templates.GEMMA3, tokenizer_class="GemmaTokenizer")
    assert rendered(chat.read(directory)) == theirs(directory)
    assert rendered(chat.read(directory)).startswith("<bos><turn>user")


def test_of_named_templates_the_default_is_taken_and_that_for_tools(directory: Path) -> None:
    named = [
        {"name": "tool_use", "template": HERMES},
        {"name": "default", "template": templates.CHATML},
    ]
    configure(directory, chat_template=named)
    found = chat.read(directory)
    assert isinstance(found, ChatFormats) and isinstance(found.tools, Ways)
    assert found == chat.derive(templates.CHATML, {}, HERMES)
    assert rendered(found) == theirs(directory)
    configure(directory, chat_template=named[:1])
    assert "no default specified" in str(chat.read(directory))


def test_a_file_of_its_own_goes_before_the_configuration(directory: Path) -> None:
    configure(directory, chat_template=templates.PHI3, eos_token="<end>")
    (directory / "chat_template.jinja").write_text(templates.PHI4)
    assert chat.read(directory) == chat.derive(templates.PHI4, {"eos_token": "<end>"})
    assert rendered(chat.read(directory)) == theirs(directory)


@pytest.mark.parametrize("fields", [None, {}, {"chat_template": None}])
def test_a_checkpoint_may_have_none(directory: Path, fields: dict[str, Any] | None) -> None:
    if fields is not None:
        configure(directory, **fields)
    assert chat.read(directory) == Refusal("the checkpoint has no chat template")


def test_code_of_the_checkpoint_is_not_run(directory: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (directory / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: ...\n")
    configure(
        directory,
        chat_template=templates.CHATML,
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": [None, "own.Own"]},
    )
    found = chat.read(directory)
    assert not ran.exists()
    assert isinstance(found, Refusal)
    assert "cannot load the chat template" in str(found)


def test_an_unreadable_configuration_is_told(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"chat_template": ')
    assert "cannot load the chat template" in str(chat.read(directory))


def test_a_refusal_is_stored_and_the_model_with_it(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    configure(directory, chat_template="{{ raise_exception('Not for chats.') }}")
    done = CliRunner().invoke(main, ["export", str(directory), str(model), "--no-check"])
    assert done.exit_code == 0, done.output
    assert archive.read_chat(model) == Refusal("the template says: Not for chats.")
    assert done.stdout.endswith("chat: none, because the template says: Not for chats.\n")


def test_the_command_tells_what_was_found(directory: Path, tmp_path: Path) -> None:
    configure(directory, chat_template=templates.QWEN3)
    done = CliRunner().invoke(
        main, ["export", str(directory), str(tmp_path / "m.pt"), "--no-check"]
    )
    assert "\nchat: system, several turns, thinking, history behind </think>" in done.stdout


def test_older_files_have_none(directory: Path, tmp_path: Path) -> None:
    export(directory, tmp_path / "new.pt", check=False)
    with (
        zipfile.ZipFile(tmp_path / "new.pt") as new,
        zipfile.ZipFile(tmp_path / "old.pt", "w") as old,
    ):
        for record in new.infolist():
            if not record.filename.endswith("/chat.json"):
                old.writestr(record, new.read(record))
    assert "from before chat formats" in str(archive.read_chat(tmp_path / "old.pt"))
    assert archive.read_chat(tmp_path / "new.pt") == Refusal("the checkpoint has no chat template")


def test_templates_and_directories_can_be_asked_about(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "gemma.jinja").write_text(templates.GEMMA2)
    (tmp_path / "broken.jinja").write_text("{% if %}")
    configure(directory, chat_template=templates.CHATML)
    paths = [tmp_path / "gemma.jinja", tmp_path / "broken.jinja", directory]
    done = CliRunner().invoke(tell, [str(path) for path in paths])
    assert done.exit_code == 0, done.output
    gemma, broken, hf = done.stdout.splitlines()
    assert gemma.startswith(f"{paths[0]}: no system (the template says: No system role here), ")
    assert broken.startswith(f"{paths[1]}: none, because the template does not compile: line 1")
    assert (
        hf
        == f"{directory}: system, several turns, ends with an answer, no tools (the template does not know tools)"
    )
