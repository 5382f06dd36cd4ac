"""What makes a prompt of a conversation, as a checkpoint's template does: chat.json."""

from epikv.export.chat.format import ChatFormats, Format, Refusal, from_json, to_json, told
from epikv.export.chat.reading import derive, read, template_json

__all__ = [
    "ChatFormats",
    "Format",
    "Refusal",
    "derive",
    "from_json",
    "read",
    "template_json",
    "to_json",
    "told",
]
