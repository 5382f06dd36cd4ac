"""Server-sent events."""

import json

from epikv.gateway.events import event


def test_no_text_ends_a_line() -> None:
    """Clients that split by Python's lines know more ends than the two newlines."""
    text = "a\nb\r\x85\u2028\u2029c\x0b\x0c\x1c\x1d\x1eé"
    line, empty = event({"text": text}).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text} and empty == ""
    assert "é" in line
