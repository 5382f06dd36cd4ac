"""The tools around `epikvd`: client, command line, exporter, sample model, benches.

The client's names live here; they load grpc on first use, so that the other parts need not have it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_HOMES = {
    "epikv.admin": ("Admin",),
    "epikv.async_client": ("AsyncClient", "AsyncStream"),
    "epikv.client": ("Client", "Stream", "patiently"),
    "epikv.connection": ("Tls",),
    "epikv.errors": (
        "DeadlineExceeded",
        "FieldViolation",
        "InvalidRequest",
        "NotFound",
        "QueueFull",
        "RpcError",
        "Unavailable",
    ),
    "epikv.outcome": ("Outcome", "Patience"),
    "epikv.messages": (
        "Accepted",
        "ActiveRequest",
        "Answer",
        "AnswerDelta",
        "Completion",
        "CreatedPacket",
        "Delta",
        "Event",
        "EvictionEvent",
        "Finished",
        "GenerateResult",
        "Model",
        "ModelLoad",
        "ModelStatus",
        "OutcomeResult",
        "Packet",
        "Policy",
        "Progress",
        "PromptLogprobs",
        "Recorded",
        "RenderedChat",
        "ScoreResponse",
        "ServerStatus",
        "Summary",
        "ToolCall",
        "ToolCallDelta",
        "TopLogprobs",
    ),
    "epikv.options": (
        "Chat",
        "Experiment",
        "Kv",
        "Output",
        "Sampling",
        "Scheduling",
        "Session",
        "Speculation",
        "Steering",
        "Stop",
        "Tool",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605  it is a list


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("epikv")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'epikv' has no attribute '{name}'")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
