"""Expressions of panels, as Grafana takes them: with its variables in them."""

# What a panel shows of: the chosen instances, or of these the chosen models.
OF_INSTANCE = 'instance=~"$instance"'
OF_MODEL = f'{OF_INSTANCE}, model=~"$model"'


def series(name: str, *matchers: str, of: str = OF_MODEL) -> str:
    return f"{name}{{{', '.join([of, *matchers])}}}"


def rate(name: str, *matchers: str, of: str = OF_MODEL) -> str:
    """A second, of each series."""
    return f"rate({series(name, *matchers, of=of)}[$__rate_interval])"


def total(by: str, expression: str) -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def rates(name: str, *matchers: str, by: str = "", of: str = OF_MODEL) -> str:
    """A second, added up."""
    return total(by, rate(name, *matchers, of=of))


def quantile(of_all: float, name: str, *matchers: str, by: str = "", of: str = OF_MODEL) -> str:
    """Of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({of_all}, {rates(f'{name}_bucket', *matchers, by=labels, of=of)})"


def mean(name: str, *matchers: str, by: str = "", of: str = OF_MODEL) -> str:
    """Of what a histogram has counted."""
    whole, count = (rates(f"{name}_{part}", *matchers, by=by, of=of) for part in ("sum", "count"))
    return f"{whole} / {count}"


def share(part: str, whole: str) -> str:
    """Of two expressions with the same labels: 0 where the part has no series, nothing where the whole is 0."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"
