"""The tests of ``mlx-mtp verify``, in NumPy alone."""

from __future__ import annotations

import math

import numpy as np

FEW = 5  # cells with a lower expected count are pooled


def chi2_sf(x: float, freedom: float) -> float:
    """How often a chi-square with so many degrees of freedom exceeds ``x``.

    The regularised upper incomplete gamma function, by its series below the mean and
    by Lentz's continued fraction above (Numerical Recipes, 6.2).
    """
    a, x = freedom / 2, float(x) / 2
    if x <= 0 or a <= 0:
        return 1.0
    if math.isinf(x):
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - front * total)
    b = x + 1 - a
    c, d = math.inf, 1 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b)
        c = b + step / c
        h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * h


def normal_p(z: float) -> float:
    """The two-sided p-value of a standard normal value."""
    return math.erfc(abs(z) / math.sqrt(2))


def count_p(observed: float, expected: float, variance: float, trials: float) -> float:
    """The two-sided p-value of a number of successes of unlike chances.

    The normal law; where it is too narrow, the Poisson law of the rarer outcome.
    """
    if variance >= 100:
        return normal_p((observed - expected) / math.sqrt(variance))
    if expected > trials / 2:
        observed, expected = trials - observed, trials - expected
    if expected <= 0:
        return float(observed <= 0)

    def at_most(k):
        return chi2_sf(2 * expected, 2 * (k + 1)) if k >= 0 else 0.0

    return min(1.0, 2 * min(at_most(observed), 1 - at_most(observed - 1)))


def goodness(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Chi-square test of counts against probabilities: p-value, degrees of freedom.

    Cells that expect fewer than ``FEW`` are pooled. A count where ``p`` is 0 gives 0.
    """
    counts, expected = counts.ravel(), p.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0, 1
    rare = expected < FEW
    if 0 < expected[rare].sum() < FEW:  # too rare even together
        rare[np.where(rare, np.inf, expected).argmin()] = True
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = observed.size - 1
    return (chi2_sf(statistic, freedom) if freedom else 1.0), freedom


def two_sample(a: np.ndarray, b: np.ndarray) -> tuple[float, int]:
    """Chi-square test that two samples of ids come from one distribution.

    Ids that both together have fewer than ``2 * FEW`` times are pooled. Gives the
    p-value and the degrees of freedom.
    """
    ids, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    counts = np.zeros((2, ids.size))
    np.add.at(counts[0], places[: a.size], 1)
    np.add.at(counts[1], places[a.size :], 1)
    rare = counts.sum(axis=0) < 2 * FEW
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)])
    counts = counts[:, counts.sum(axis=0) > 0]
    share = counts.sum(axis=1, keepdims=True) / counts.sum()
    expected = share * counts.sum(axis=0)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.shape[1] - 1
    return (chi2_sf(statistic, freedom) if freedom else 1.0), freedom


def kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    """The p-value that two samples of numbers come from one distribution.

    By the limit law, with Stephens' correction; ties make it conservative.
    """
    both = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), both, "right") / x.size for x in (a, b)]
    distance = np.abs(below[0] - below[1]).max()
    size = math.sqrt(a.size * b.size / (a.size + b.size))
    x = (size + 0.12 + 0.11 / size) * distance
    if x < 0.2:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * sum(terms)))


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values: one below alpha is significant at alpha over all."""
    order = np.argsort(p_values)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def detectable(freedom: int, alpha: float, size: float) -> float:
    """The distance in total variation that a chi-square test finds 99 times of 100.

    For ``size`` draws against known probabilities, when half of the cells by weight
    are too frequent by one factor and the others too rare. The noncentral chi-square
    by Patnaik's approximation. Two samples of n draws are as good as ``n / 2``.
    """
    if not freedom:
        return 1.0

    def found(shift):
        scale = (freedom + 2 * shift) / (freedom + shift)
        return chi2_sf(bar / scale, (freedom + shift) / scale)

    bar = _solve(lambda x: alpha > chi2_sf(x, freedom))
    return min(1.0, math.sqrt(_solve(lambda x: found(x) > 0.99) / size) / 2)


def _solve(above) -> float:
    """The smallest number for which ``above`` holds, by bisection."""
    low, high = 0.0, 1.0
    while not above(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high
