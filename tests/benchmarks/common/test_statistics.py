import random

import pytest

from benchmarks.common.statistics import paired_ratio, percentile, pooled_ratio, ratio_of_sums


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([5.0], 0.99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_ratio_of_pairs_has_an_interval_around_it() -> None:
    theirs = [float(n) for n in range(10, 30)]
    ours = [each * (1.1 if n % 2 else 1.3) for n, each in enumerate(theirs)]
    ratio = paired_ratio(ours, theirs)
    assert ratio.median == pytest.approx(1.2)
    assert 1.1 < ratio.low < (1.1 * 1.3) ** 0.5 < ratio.high < 1.3
    # whatever slows a pair down falls on both
    slow = [10.0 if n == 7 else 1.0 for n in range(20)]
    again = paired_ratio(
        [a * s for a, s in zip(ours, slow, strict=True)],
        [b * s for b, s in zip(theirs, slow, strict=True)],
    )
    assert again == pytest.approx(ratio)


def test_a_ratio_of_sums_lies_in_its_own_interval() -> None:
    # the geometric mean of these pairs is 0, the ratio of the sums is not
    found = ratio_of_sums([0.0, 3.0, 5.0, 4.0], [2.0, 2.0, 2.0, 2.0])
    assert found is not None
    assert found.ratio == 1.5 and 0.3 < found.low < 1.5 < found.high < 2.5
    # resamples without anything below count as the largest of the others
    sparse = ratio_of_sums([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.5])
    assert sparse is not None
    assert sparse.ratio == 8.0 and sparse.high == 8.0 and 2.0 < sparse.low < 8.0
    assert ratio_of_sums([1.0, 1.0], [0.0, 0.0]) is None
    with pytest.raises(ValueError, match="none negative"):
        ratio_of_sums([], [])
    with pytest.raises(ValueError, match="none negative"):
        ratio_of_sums([1.0], [-1.0])


def test_a_quantile_of_short_stretches_is_that_of_all() -> None:
    rng = random.Random(3)

    def stretch(slower: float, drift: float) -> list[float]:
        return [slower * drift * (10 + rng.expovariate(1.0)) for _ in range(200)]

    # the machine gets slower and slower
    drifts = [1 + 0.01 * n for n in range(60)]
    theirs = [stretch(1.0, drift) for drift in drifts]
    same = pooled_ratio([stretch(1.0, drift) for drift in drifts], theirs, 0.99)
    assert same.low < 1.0 < same.high and same.high - same.low < 0.06
    slower = pooled_ratio([stretch(1.05, drift) for drift in drifts], theirs, 0.99)
    assert slower.ratio == pytest.approx(1.05, abs=0.02) and slower.low > 1.005
    everything = percentile([x for each in theirs for x in each], 0.99)
    assert pooled_ratio(theirs, [[everything]] * 60, 0.99).ratio == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ValueError, match="values"):
        pooled_ratio([[]], [[1.0]], 0.99)
