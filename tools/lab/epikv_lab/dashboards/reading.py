"""A dashboard's file, and what a Prometheus answers to its queries."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")


@dataclass(frozen=True)
class Asked:
    """A query as it stands in a file."""

    promql: str
    legend: str
    instant: bool


@dataclass(frozen=True)
class Drawn:
    """A panel as it stands in a file."""

    row: str
    title: str
    tells: str
    kind: str
    unit: str
    stacked: bool
    logarithmic: bool
    limit: float | None
    hidden: frozenset[str]
    place: tuple[int, int, int, int]  # x, y, width, height, of a grid 24 wide
    queries: tuple[Asked, ...]


@dataclass(frozen=True)
class Line:
    """Of an answer over time: a series' name by the legend, and its points."""

    name: str
    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class File:
    def __init__(self, path: Path) -> None:
        self.json: dict[str, Any] = json.loads(path.read_text())
        self.name, self.title = path.stem, str(self.json["title"])

    def panels(self) -> Iterator[Drawn]:
        row = ""
        for panel in self.json["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
                continue
            defaults = panel["fieldConfig"]["defaults"]
            custom = defaults.get("custom", {})
            steps = [step["value"] for step in defaults["thresholds"]["steps"]]
            hidden = [
                name
                for each in panel.get("transformations", [])
                for name in each["options"]["excludeByName"]
            ]
            grid = panel["gridPos"]
            yield Drawn(
                row,
                panel["title"],
                panel["description"],
                panel["type"],
                defaults["unit"],
                custom.get("stacking", {}).get("mode") == "normal",
                custom.get("scaleDistribution", {}).get("type") == "log",
                steps[1] if len(steps) > 1 else None,
                frozenset(hidden),
                (grid["x"], grid["y"], grid["w"], grid["h"]),
                tuple(
                    Asked(each["expr"], each.get("legendFormat", ""), each.get("instant", False))
                    for each in panel["targets"]
                ),
            )

    def variables(self) -> dict[str, tuple[str, str | None]]:
        """Of each that has values: the query for them, and what all of them are."""
        return {
            each["name"]: (each["query"]["query"], each.get("allValue"))
            for each in self.json["templating"]["list"]
            if each["type"] == "query"
        }


class Refused(Exception):
    """Prometheus cannot be reached, or does not take a query."""


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def get(self, path: str, **arguments: str | float) -> Any:
        asked = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{asked}", timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise Refused(f"{arguments}: {error.read().decode()}") from error
        except urllib.error.URLError as error:
            raise Refused(f"{self._url}: {error.reason}") from error


class Reader:
    """What a dashboard shows of the time from `start` to `end`, with all that its variables offer."""

    def __init__(
        self, file: File, prometheus: Prometheus, start: float, end: float, rate_seconds: float
    ) -> None:
        self._prometheus, self.start, self.end = prometheus, start, end
        self._values = {
            "__rate_interval": f"{rate_seconds:.0f}s",
            "__range": f"{max(end - start, 1):.0f}s",
        }
        for name, (query, everything) in file.variables().items():
            offered = self.label_values(query)
            self._values[name] = everything or "|".join(re.escape(each) for each in offered)

    def with_values(self, promql: str) -> str:
        """Without variables, as Grafana asks it; in a string of PromQL a backslash is written twice."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            return self._values[name].replace("\\", r"\\")

        return re.sub(r"\$(\w+)", value, promql)

    def label_values(self, query: str) -> list[str]:
        found = LABEL_VALUES.fullmatch(query)
        assert found is not None, query
        arguments: dict[str, str | float] = {"match[]": self.with_values(found["series"])}
        arguments |= {"start": self.start, "end": self.end}
        named: list[str] = self._prometheus.get(f"label/{found['label']}/values", **arguments)
        return named

    def rows(self, query: Asked) -> list[tuple[dict[str, str], float]]:
        """What an instant query answers: labels and values."""
        answer = self._prometheus.get("query", query=self.with_values(query.promql), time=self.end)
        return [(each["metric"], float(each["value"][1])) for each in _series(answer)]

    def lines(self, query: Asked, points: int = 200) -> list[Line]:
        answer = self._prometheus.get(
            "query_range",
            query=self.with_values(query.promql),
            start=self.start,
            end=self.end,
            step=max(1, round((self.end - self.start) / points)),
        )
        return [
            Line(
                _legend(query.legend, each["metric"]),
                each["metric"],
                tuple(float(time) for time, _ in each["values"]),
                tuple(float(value) for _, value in each["values"]),
            )
            for each in answer["result"]
        ]


def _series(answer: Any) -> list[Any]:
    if answer["resultType"] == "scalar":
        return [{"metric": {}, "value": answer["result"]}]
    found: list[Any] = answer["result"]
    return found


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    if pattern in ("", "__auto"):
        return ", ".join(f"{k}={v}" for k, v in sorted(labels.items()))
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)
