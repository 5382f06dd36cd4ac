"""Server-sent events."""

import json
from typing import Any

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
# Some clients take these for ends of lines; JSON itself escapes the others.
_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def event(data: Any) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.translate(_ENDS).encode() + b"\n\n"
