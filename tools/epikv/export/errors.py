"""Why a model cannot be exported."""


class ExportError(Exception):
    """The model is not exported, and nothing was written. The message names the cause."""
