"""How a bench says what it found: one line a target, an exit status, and everything as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epikv.stats import Estimate


@dataclass(frozen=True)
class Target:
    """What `metric` was to reach: at most, or at least, `bound`."""

    metric: str
    estimate: Estimate
    bound: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the whole interval meets the bound."""
        if self.at_least:
            return self.estimate.low >= self.bound
        return self.estimate.high <= self.bound

    def __str__(self) -> str:
        e, sign = self.estimate, ">=" if self.at_least else "<="
        return (
            f"{self.metric} {e.value:.4g} [{e.low:.4g},{e.high:.4g}] {sign}{self.bound:g}"
            f" {'ok' if self.ok else 'short'}"
        )


def finish(
    bench: str,
    targets: Sequence[Target],
    details: Mapping[str, Any],
    json_file: Path | None = None,
    *,
    untargeted: str | None = None,
) -> None:
    """Prints `bench`.metric value interval target ok|short, as the last lines; exits 1 if short.

    `details` is everything measured; with the targets it goes to `json_file`. Only a bench that
    says why, in `untargeted`, may hold nothing to a target; that is told on stderr.
    """
    if (not targets) != (untargeted is not None):
        raise ValueError(f"{bench}: there must be targets, or else a reason for none")
    if json_file is not None:
        found = [{**asdict(target), "ok": target.ok} for target in targets]
        content = {"bench": bench, "targets": found, **details}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    for target in targets:
        print(f"{bench}.{target}")
    if untargeted is not None:
        print(f"{bench}: nothing was held to a target: {untargeted}", file=sys.stderr)
    if not all(target.ok for target in targets):
        sys.exit(1)
