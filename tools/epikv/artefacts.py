"""What a policy needs of one model and no request can be asked for: measured once, in a file."""

import hashlib
from pathlib import Path


def fingerprint(model: Path) -> str:
    """Names a model file by its content: its SHA-256, in hexadecimal."""
    with model.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
