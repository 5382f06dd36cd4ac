"""What scipy and statsmodels make of the figures of experiments, as data.

    python tests/golden/make_experiments.py

Writes experiments.json beside this script. It needs scipy and statsmodels, which nothing else here
does. Sequences are computed from their definitions: mixtures by numerical integration, bounds by
root finding, chances to cross them by Genz's integral of the multivariate normal distribution.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import statsmodels
import statsmodels.api as sm
from scipy import integrate, optimize, stats

RNG = np.random.default_rng(20240611)
Row = dict[str, Any]


def sample_ratio() -> list[Row]:
    """Pearson's p where every arm expects 50 units, else exact: every count at least as far off."""
    rows = []
    for weights, total in [
        ([0.5, 0.5], 1000),
        ([0.9, 0.1], 2000),
        ([0.2, 0.3, 0.5], 5000),
        ([0.5, 0.5], 60),
        ([0.9, 0.1], 40),
        ([0.99, 0.01], 300),
        ([0.4, 0.3, 0.3], 30),
    ]:
        for _ in range(4):
            units = RNG.multinomial(total, RNG.dirichlet(np.array(weights) * 60))
            statistic, p = stats.chisquare(units, np.array(weights) * total)
            if min(weights) * total < 50:
                p = min(exact(int(u), total, w) for u, w in zip(units, weights))
                p = min(1, p * (len(units) if len(units) > 2 else 1))
            rows.append(
                {"units": units.tolist(), "weights": weights, "statistic": statistic, "p": p}
            )
    return rows


def exact(count: int, total: int, weight: float) -> float:
    counts = np.arange(total + 1)
    far = abs(counts - total * weight) >= abs(count - total * weight) - 1e-9
    return float(stats.binom.pmf(counts[far], total, weight).sum())


def arm_means() -> list[Row]:
    """Weighted least squares of observations on the arms, its variance clustered by unit; and the
    same of values less the covariate, by units."""
    rows = []
    for name in (
        "one observation each",
        "clusters",
        "covariate",
        "covariate of some",
        "far from 0",
    ):
        number = 1 if name == "one observation each" else 5
        observations = []
        for unit in range(90):
            arm = int(RNG.integers(3))
            taste, x = RNG.normal(size=2)
            known: float | None = round(3 + x, 4) if "covariate" in name else None
            if name == "covariate of some" and RNG.random() < 0.3:
                known = None
            for _ in range(1 if number == 1 else int(RNG.integers(1, number + 1))):
                value = 2 + 0.3 * arm + taste + 1.5 * x + RNG.normal()
                if name == "far from 0":
                    value = 5e8 + 1e3 * value
                observations.append([arm, unit, round(value, 4), known])
        RNG.shuffle(order := list(range(len(observations))))
        rows.append({"name": name, "observations": [observations[i] for i in order]})
        rows[-1] |= estimates(observations)
    return rows


def estimates(observations: list[list[Any]]) -> Row:
    arms = [o[0] for o in observations]
    units = np.array([o[1] for o in observations])
    values = np.array([o[2] for o in observations])
    design = np.eye(3)[arms]
    fit = sm.OLS(values, design).fit(
        cov_type="cluster", cov_kwds={"groups": units, "use_correction": False}
    )
    found: Row = {"means": fit.params.tolist(), "variances": []}
    names, first = np.unique(units, return_index=True)
    arm_of = np.array(arms)[first]
    for arm in range(3):
        n = int((arm_of == arm).sum())
        found["variances"].append(fit.cov_params()[arm, arm] * n / (n - 1))
    known = [o[3] for o in observations]
    if all(x is None for x in known):
        return found
    xs = np.array([np.nan if known[i] is None else known[i] for i in first])
    xs = np.where(np.isnan(xs), np.nanmean(xs), xs)  # missing ones are the mean
    residual = np.array([fit.resid[units == u].sum() for u in names])
    number = np.array([(units == u).sum() for u in names])
    covariances = []
    for arm in range(3):
        of = arm_of == arm
        mean_number = number[of].mean()
        covariances.append(np.cov(residual[of] / mean_number, xs[of]) / of.sum())
    theta = sum(c[0, 1] for c in covariances) / sum(c[1, 1] for c in covariances)
    found["coefficient"] = theta
    found["adjusted"] = [
        fit.params[arm] - theta * (xs[arm_of == arm].mean() - xs.mean()) for arm in range(3)
    ]
    # Of arm 2 - arm 0, in which the mean of all cancels.
    found["variance_of_difference"] = sum(
        covariances[arm][0, 0]
        - 2 * theta * covariances[arm][0, 1]
        + theta**2 * covariances[arm][1, 1]
        for arm in (0, 2)
    )
    return found


def mixture() -> list[Row]:
    rows = []
    for alpha in (0.001, 0.05, 0.3):
        for spread in (0.01, 1, 8, 1000):
            rows.append({"alpha": alpha, "spread": spread, "bound": bound_of(alpha, spread)})
        rows[-1]["tightest"] = tightest(alpha)
    return rows


def bound_of(alpha: float, spread: float) -> float:
    """Where the likelihood of effects of N(0, tau^2), over that of no effect, is 1 / alpha."""
    return optimize.brentq(lambda z: evidence(z, spread) + np.log(alpha), 0, 500) ** 2


def tightest(alpha: float) -> float:
    def bound(log: float) -> float:
        return (1 + np.exp(-log)) * (np.log1p(np.exp(log)) - 2 * np.log(alpha))

    least = optimize.minimize_scalar(
        bound, bounds=(-5, 10), method="bounded", options={"xatol": 1e-10}
    )
    return float(np.exp(least.x))


def evidence(z: float, spread: float) -> float:
    """Of z standard errors: log of the integral of exp(e z - e^2 / 2) over e of N(0, spread)."""

    def log(e: float) -> float:
        return e * z - e * e / 2 - e * e / (2 * spread)

    peak = z * spread / (1 + spread)
    width = 12 * np.sqrt(spread / (1 + spread))
    area, _ = integrate.quad(
        lambda e: np.exp(log(e) - log(peak)), peak - width, peak + width, epsabs=1e-13
    )
    return float(log(peak) + np.log(area / np.sqrt(2 * np.pi * spread)))


def proportions() -> list[Row]:
    rows = []
    for ones, trials in [(0, 10), (10, 10), (3, 20), (0, 20000), (25, 25000), (500, 1000)]:
        for alpha in (0.01, 0.05):
            lower, upper = sequence(ones, trials, alpha)
            rows.append({"ones": ones, "trials": trials, "alpha": alpha})
            rows[-1] |= {"lower": lower, "upper": upper}
    return rows


def sequence(ones: int, trials: int, alpha: float) -> tuple[float, float]:
    """Where the beta-binomial mixture of Jeffreys' prior, over the binomial, is 1 / alpha."""

    def excess(p: float) -> float:
        log = stats.betabinom.logpmf(ones, trials, 0.5, 0.5)
        return float(log - stats.binom.logpmf(ones, trials, p) + np.log(alpha))

    share, tiny = ones / trials, 1e-15
    lower = optimize.brentq(excess, tiny, share, xtol=1e-16) if ones else 0
    upper = optimize.brentq(excess, share + tiny, 1 - tiny, xtol=1e-16) if share < 1 else 1
    return lower, upper


def crossings() -> list[Row]:
    rows = []
    for bounds, drift in [
        ([1.96], 2.8),
        ([2.5, 2.5, 2.5], 0.0),
        ([4.0, 3.0, 2.5, 2.2, 2.0], 0.0),
        ([4.0, 3.0, 2.5, 2.2, 2.0], 2.5),
        ([3.0, 3.0, 3.0, 3.0], -3.5),
    ]:
        looks = len(bounds)
        times = (np.arange(looks) + 1) / looks
        covariance = np.sqrt(np.minimum.outer(times, times) / np.maximum.outer(times, times))
        inside = stats.multivariate_normal(
            drift * np.sqrt(times), covariance, abseps=1e-9, releps=1e-9, maxpts=10_000_000, seed=1
        ).cdf(bounds, lower_limit=-np.array(bounds))
        rows.append({"bounds": bounds, "drift": drift, "chance": 1 - float(inside)})
    return rows


def sample_ratio_units() -> list[Row]:
    rows = []
    for weights, arm, loss, power in [
        ([1, 1], 0, 0.01, 0.8),
        ([9, 1], 1, 0.01, 0.9),
        ([2, 1, 1], 2, 0.05, 0.8),
    ]:
        units = alarming(np.array(weights) / sum(weights), arm, loss, power)
        rows.append({"weights": weights, "arm": arm, "loss": loss, "power": power, "units": units})
    return rows


def alarming(share: np.ndarray, arm: int, loss: float, power: float) -> float:
    counted = share * np.where(np.arange(len(share)) == arm, 1 - loss, 1)
    by_unit = ((counted / counted.sum() - share) ** 2 / share).sum()
    df = len(share) - 1
    bound = stats.chi2.isf(0.001, df)
    return optimize.brentq(
        lambda n: stats.ncx2.sf(bound, df, n * by_unit) - power, 10, 1e9, xtol=1e-3
    )


def sameness() -> list[Row]:
    """The p of several estimates: the mixture over their deviations, of N(0, tau^2) each, from a
    value that any may be, as a ratio of the likelihoods of their differences."""
    rows = []
    for values, variances, tau_squared in [
        ([0.1, 0.5], [0.01, 0.02], 0.04),
        ([1.0, 1.0, 1.0], [0.01, 1.0, 0.1], 0.5),
        ([0.0, 0.3, -0.4], [0.02, 0.01, 0.05], 0.1),
        ([5.0, 5.9, 4.6, 5.1], [0.09, 0.04, 0.2, 1e-4], 1e-2),
    ]:
        contrasts = np.eye(len(values))[1:] - np.eye(len(values))[0]
        seen = contrasts @ np.diag(variances) @ contrasts.T
        mixed = seen + tau_squared * contrasts @ contrasts.T
        x = contrasts @ np.array(values)
        evidence = stats.multivariate_normal.logpdf(x, cov=mixed)
        evidence -= stats.multivariate_normal.logpdf(x, cov=seen)
        row = {"values": values, "variances": variances, "tau_squared": tau_squared}
        rows.append(row | {"p": min(1.0, float(np.exp(-evidence)))})
    return rows


def main() -> None:
    cases = (
        sample_ratio,
        arm_means,
        mixture,
        proportions,
        crossings,
        sample_ratio_units,
        sameness,
    )
    lines = [
        f'"command": "python tests/golden/{Path(__file__).name}"',
        f'"reference": "scipy {scipy.__version__}, statsmodels {statsmodels.__version__}"',
    ]
    for case in cases:
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in case())
        lines.append(f'"{case.__name__}": [\n{rows}]')
    text = "{" + ",\n".join(lines) + "}\n"
    json.loads(text)
    Path(__file__).with_name("experiments.json").write_text(text)


if __name__ == "__main__":
    main()
