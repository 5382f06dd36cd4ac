"""What makes a prompt of a conversation, as a checkpoint's template does: chat.json."""

from epikv.export.chat.format import Format
from epikv.export.chat.formats import ChatFormats, Ways, from_json, to_json, told
from epikv.export.chat.reading import derive, read, template_json
from epikv.export.chat.text import Refusal

__all__ = [
    "ChatFormats",
    "Format",
    "Refusal",
    "Ways",
    "derive",
    "from_json",
    "read",
    "template_json",
    "to_json",
    "told",
]
