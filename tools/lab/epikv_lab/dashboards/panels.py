"""What a dashboard is made of. Grafana's JSON is made of it in grafana.py."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Unit(StrEnum):
    """As Grafana names them."""

    NUMBER = "short"
    SHARE = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    PER_SECOND = "cps"
    REQUESTS_PER_SECOND = "reqps"
    SINCE = "dateTimeFromNow"


class Kind(StrEnum):
    """As Grafana names them."""

    LINES = "timeseries"
    NUMBER = "stat"
    TABLE = "table"


@dataclass(frozen=True)
class Query:
    promql: str
    legend: str = ""  # `{{label}}` stands for a label's value

    def __post_init__(self) -> None:
        assert self.promql.count("(") == self.promql.count(")"), self.promql


@dataclass(frozen=True)
class Panel:
    title: str
    tells: str  # what one sees in it
    queries: tuple[Query, ...]
    unit: Unit = Unit.NUMBER
    kind: Kind = Kind.LINES
    width: int = 8  # of 24
    stacked: bool = False
    # From this value on it is red; below it, if low_is_bad.
    limit: float | None = None
    low_is_bad: bool = False
    logarithmic: bool = False
    hidden_columns: tuple[str, ...] = ()  # of a table, beside those of Prometheus


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    name: str
    values_of: str  # `label_values(SERIES, LABEL)`
    whole: str | None = ".*"  # what "All" matches; None: just the values that there are


@dataclass(frozen=True)
class Dashboard:
    name: str  # of its file, and of its address in Grafana
    title: str
    tells: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = field(default=())


def lines(title: str, tells: str, *queries: Query | str, **more: Any) -> Panel:
    return Panel(title, tells, _queries(queries), **more)


def number(title: str, tells: str, query: str, **more: Any) -> Panel:
    given = {"width": 4, **more}
    return Panel(title, tells, (Query(query),), kind=Kind.NUMBER, **given)


def table(title: str, tells: str, query: str, *hidden: str, **more: Any) -> Panel:
    return Panel(title, tells, (Query(query),), kind=Kind.TABLE, hidden_columns=hidden, **more)


def _queries(given: tuple[Query | str, ...]) -> tuple[Query, ...]:
    return tuple(each if isinstance(each, Query) else Query(each) for each in given)


INSTANCE = Variable("instance", "label_values(epikv_build_info, instance)", whole=None)
MODEL = Variable("model", 'label_values(epikv_model_info{instance=~"$instance"}, model)')
