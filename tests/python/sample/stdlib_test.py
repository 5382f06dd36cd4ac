"""The model of Python's library: what it reads, and that a run which was stopped goes on exactly."""

from pathlib import Path

import pytest
import torch
from epikv_lab.stdlib import corpus
from epikv_lab.stdlib.train import Recipe, Run

TINY = Recipe(
    tokens=6 * 64, window=32, windows=2, width=32, layers=1, heads=2, kv_heads=1, ffn_width=64
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """As Debian's packages unpack: files of the library, and what is no text of it."""
    root = tmp_path / "sources" / "root"
    (root / "encodings").mkdir(parents=True)
    for number in range(150):
        lines = (f"def f{number}_{i}(x):\n    return x + {i}\n" for i in range(12))
        (root / f"m{number}.py").write_text("\n".join(lines))
    (root / "copy.py").write_text((root / "m1.py").read_text())
    (root / "encodings" / "table.py").write_text("x = 1\n" * 100)
    (root / "short.py").write_text("x = 1\n")
    (root / "latin.py").write_bytes(b"# \xe9\n" * 100)
    (root / "page.html").write_text("<p>" * 100)
    return root.parent


def test_each_text_is_read_once_and_tables_are_not(sources: Path) -> None:
    read = corpus.texts(corpus.fetch(sources))
    names = {text.name for text in read}
    assert len(names) == 150 and len({"copy.py", "m1.py"} & names) == 1
    assert all(name == "copy.py" or name.startswith("m") for name in names)
    assert {text.part for text in read} == {"train", "validation", "test"}


def test_a_tokenizer_gives_texts_back(sources: Path) -> None:
    read = corpus.texts(corpus.fetch(sources))
    tokenizer = corpus.make_tokenizer(read)
    assert all(tokenizer.decode(tokenizer.encode(text.text).ids) == text.text for text in read)
    ids = corpus.encode(tokenizer, read, "train")
    assert (ids == tokenizer.token_to_id(corpus.END)).sum() == sum(
        text.part == "train" for text in read
    )


def test_policies_are_calibrated_on_the_middle_of_texts_that_the_model_read(sources: Path) -> None:
    for number in range(40):
        (sources / "root" / f"long{number}.py").write_text(
            "".join(f"x{number} = {i}\n" for i in range(900))
        )
    read = corpus.texts(corpus.fetch(sources))
    found = corpus.excerpts(read, 8)
    assert len({text.name for text in found}) == 8
    whole = {text.name: text for text in read}
    for text in found:
        before, after = whole[text.name].text.split(text.text)
        assert abs(len(before) - len(after)) <= 1 and len(text.text) == corpus.EXCERPT
        assert whole[text.name].part == "train"


def test_requests_are_parts_of_texts_that_the_model_never_read(sources: Path) -> None:
    for number in range(60):
        (sources / "root" / f"long{number}.py").write_text(
            "".join(f"x{number} = {i}\n" for i in range(500))
        )
    read = corpus.texts(corpus.fetch(sources))
    tests = [text.text for text in read if text.part == "test"]
    every = corpus.requests(read, 10**6)
    assert len(every) == len(set(every)) > 8
    assert all(len(part) == corpus.REQUEST for part in every)
    assert all(sum(part in text for text in tests) == 1 for part in every)
    few = corpus.requests(read, 8)
    assert len(set(few)) == 8 and set(few) < set(every)


def test_a_run_that_was_stopped_goes_on_exactly(sources: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = Run(TINY, tmp_path / "whole", sources)
    losses = [whole._take_step() for _ in range(4)]
    stopped = Run(TINY, tmp_path / "stopped", sources)
    assert [stopped._take_step() for _ in range(2)] == losses[:2]
    stopped._checkpoint()
    assert [Run(TINY, tmp_path / "stopped", sources)._take_step()] == [losses[2]]
    with pytest.raises(ValueError, match="another recipe or of other texts"):
        Run(Recipe(seed=1), tmp_path / "stopped", sources)


def test_windows_that_run_together_give_the_same_losses(sources: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    single, together = (
        Run(TINY, tmp_path / str(at_once), sources, at_once=at_once) for at_once in (1, 2)
    )
    for _ in range(3):
        assert single._take_step() == pytest.approx(together._take_step(), rel=1e-2)
    with pytest.raises(ValueError, match="2 windows do not split into parts of 3"):
        Run(TINY, tmp_path / "3", sources, at_once=3)


def test_a_run_ends_with_a_model_that_transformers_loads(sources: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    Run(TINY, tmp_path, sources).train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("def f", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)
