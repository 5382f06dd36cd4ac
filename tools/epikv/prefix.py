"""What tells a balancer which requests begin alike, so that one replica gets them: a digest with each call.

Its value is the start of a SHA-256. In it are the request's cache_salt, its model, and the first of these that
the request has:

- a key of the client's own (`prompt_cache_key` of OpenAI's API),
- the id of its session,
- of a conversation, the role and content of each message up to the first of the user's. So all turns of one
  conversation have one value;
- the first TOKENS tokens, or CHARACTERS characters, of a prompt. What is shorter leaves no prefix in the cache
  that a longer prompt could begin with, as the daemon keeps whole chunks of 256 tokens.

Calls that have no prompt have no prefix.
"""

import hashlib
import struct
from collections.abc import Iterator

from google.protobuf.message import Message

from epikv.v1 import generation_pb2, packet_pb2

HEADER = "x-epikv-prefix"
TOKENS = 256
CHARACTERS = 1024
_DIGITS = 16


def prefix_metadata(request: Message, key: str = "") -> tuple[tuple[str, str], ...]:
    """The metadata of a call with this request."""
    if isinstance(request, packet_pb2.CreatePacketRequest):
        return prefix_metadata(request.request, key)
    if not isinstance(request, generation_pb2.GenerateRequest | generation_pb2.ScoreRequest):
        return ()
    digest = hashlib.sha256()
    for part in (request.kv.cache_salt, request.model, *_beginning(request, key)):
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(struct.pack("<I", len(data)) + data)
    return ((HEADER, digest.hexdigest()[:_DIGITS]),)


def _beginning(
    request: generation_pb2.GenerateRequest | generation_pb2.ScoreRequest, key: str
) -> Iterator[str | bytes]:
    """Parts of which the first says what kind the others are."""
    if key:
        yield from ("key", key)
    elif isinstance(request, generation_pb2.GenerateRequest) and request.HasField("session"):
        yield from ("session", request.scheduling.tenant, request.session.id)
    elif request.HasField("chat"):
        yield "chat"
        for message in request.chat.messages:
            yield from (generation_pb2.ChatRole.Name(message.role), message.content)
            if message.role == generation_pb2.CHAT_ROLE_USER:
                return
    elif request.HasField("token_ids"):
        ids = request.token_ids.ids[:TOKENS]
        yield from ("token_ids", struct.pack(f"<{len(ids)}i", *ids))
    else:
        yield from ("text", request.text[:CHARACTERS])
