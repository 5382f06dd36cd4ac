"""Server-sent events."""

import json
from typing import Any

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
