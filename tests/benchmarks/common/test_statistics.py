import pytest

from benchmarks.common.statistics import paired_ratio, percentile


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
