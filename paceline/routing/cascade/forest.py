"""Forest of decision trees over a linear score, the form and the confidence: it sees what a sum
cannot, such as that a sure answer means little in one kind of question.

It is fitted with scikit-learn where that is installed (``paceline[calibrate]``), and read by NumPy
alone. Extremely randomised trees: Geurts, Ernst and Wehenkel, Machine Learning 63 (2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.routing.cascade.scorer import Features, Scorer, fit_scorer

__all__ = ["Forest", "fit_forest", "has_forests"]

_NUM_TREES: Final = 100
_MIN_LEAF: Final = 3
_MAX_DEPTH: Final = 12
# levels of a tree that one step takes
_LEVELS: Final = 3
# share of the values that each split looks at
_SHARE: Final = 0.3
# parts of the samples, of which each is scored by a linear scorer of the others
_PARTS: Final = 5
_NODE: Final = np.dtype(
    [("value", "<u2"), ("threshold", "<f4"), ("left", "<u4"), ("right", "<u4"), ("share", "<f4")]
)


def _way_of(bits: int) -> int:
    """Return the place in a step's ``after`` where its comparisons lead, the first in the highest
    bit."""
    at = 0
    for _ in range(_LEVELS):
        at = 2 * at + 1 + (bits >> (7 - at) & 1)
    return at - 7


_WAYS: Final = np.array([_way_of(bits) for bits in range(256)])


class _Step(msgspec.Struct, frozen=True):
    """Three levels of all trees, for the nodes that the step before may lead to.

    ::

        0          comparisons, as a heap; an eighth one is there for whole bytes
        1   2
        3 4 5 6    ``after``: the node reached by each way, a number of the next step
    """

    value: NDArray[np.intp]
    threshold: NDArray[np.float32]
    after: NDArray[np.intp]


class Forest(msgspec.Struct, frozen=True):
    """Trees, whose nodes are in one table; a leaf is its own child."""

    # from the hashed n-grams and the form of a prompt
    linear: Scorer
    roots: NDArray[np.intp]
    nodes: NDArray[Any]
    steps: Sequence[_Step]
    # numbers of the trees, which are the nodes of the first step
    trees: NDArray[np.intp]
    # good samples of each node behind the last step
    share: NDArray[np.float32]

    @classmethod
    def of_nodes(cls, linear: Scorer, roots: NDArray[Any], nodes: NDArray[Any]) -> Forest:
        """Return the forest of a table of nodes."""
        steps, at = [], roots.astype(np.intp)
        for _ in range(_MAX_DEPTH // _LEVELS):
            heap = [at]
            for each in range((1 << _LEVELS) - 1):
                heap += [nodes["left"][heap[each]], nodes["right"][heap[each]]]
            asked = np.stack([*heap[: len(heap) // 2], at], axis=1)
            at, after = np.unique(np.stack(heap[len(heap) // 2 :], axis=1), return_inverse=True)
            value, threshold = nodes["value"][asked].astype(np.intp), nodes["threshold"][asked]
            steps.append(_Step(value, threshold, after.reshape(-1, 1 << _LEVELS)))
        return cls(linear, roots, nodes, steps, np.arange(len(roots)), nodes["share"][at])

    def score(self, features: Features) -> float:
        """Return the score, 0 to 1."""
        values, at = _values(self.linear, features), self.trees
        value, threshold = self.steps[0].value, self.steps[0].threshold
        # ``take`` needs half the time of an index
        for step in self.steps:
            if at is not self.trees:
                value, threshold = step.value.take(at, axis=0), step.threshold.take(at, axis=0)
            goes_right = values.take(value) > threshold
            at = step.after[at, _WAYS.take(np.packbits(goes_right))]
        return float(np.add.reduce(self.share.take(at)) / np.float32(len(at)))

    def to_bytes(self) -> bytes:
        """Return the trees, without the linear scorer."""
        count = np.array([len(self.roots)], "<u4")
        return count.tobytes() + self.roots.astype("<u4").tobytes() + self.nodes.tobytes()

    @classmethod
    def of_bytes(cls, data: bytes, linear: Scorer, num_dense: int) -> Forest:
        """Read trees. Raises ConfigError where they cannot be those of this many values."""
        count = int(np.frombuffer(data[:4], "<u4")[0]) if len(data) >= 4 else 0
        head = 4 + 4 * count
        if not count or len(data) <= head or (len(data) - head) % _NODE.itemsize:
            raise ConfigError(f"a forest of {len(data)} bytes cannot be read")
        roots = np.frombuffer(data[4:head], "<u4")
        nodes = np.frombuffer(data[head:], _NODE)
        most = max(int(roots.max()), int(nodes["left"].max()), int(nodes["right"].max()))
        if most >= len(nodes) or int(nodes["value"].max()) > num_dense:
            raise ConfigError(f"a forest names node {most} of {len(nodes)}, or a value beyond all")
        if not (np.isfinite(nodes["threshold"]).all() and np.isfinite(nodes["share"]).all()):
            raise ConfigError("a forest's thresholds and shares are not all finite")
        return cls.of_nodes(linear, roots, nodes)


def _values(linear: Scorer, features: Features) -> NDArray[np.float32]:
    """Return what the trees look at: the linear score before its last step, then the dense ones."""
    score = min(max(linear.score(features), 1e-6), 1.0 - 1e-6)
    values = np.empty(1 + len(features.dense), np.float32)
    values[0], values[1:] = math.log(score / (1.0 - score)), features.dense
    return values


def has_forests() -> bool:
    """Whether scikit-learn is installed."""
    from importlib.util import find_spec

    return find_spec("sklearn") is not None


def fit_forest(
    samples: Sequence[Features], good: Sequence[bool], penalty: float = 1.0, seed: int = 0
) -> Forest:
    """Fit a forest. The linear score of a sample is by a scorer that has not seen it, as it will be
    for a request. Raises ImportError without scikit-learn.

    Args:
        good: whether each sample's answer loses nothing.
    """
    from sklearn.ensemble import ExtraTreesClassifier

    truth = np.array(good, bool)
    rows = np.zeros((len(samples), 1 + len(samples[0].dense)), np.float32)
    order = np.random.default_rng(seed).permutation(len(samples))
    for part in np.array_split(order, min(_PARTS, len(samples))):
        others = np.setdiff1d(order, part)
        scorer = fit_scorer([samples[i] for i in others], truth[others].tolist(), penalty)
        rows[part] = [_values(scorer, samples[i]) for i in part]
    trees = ExtraTreesClassifier(
        _NUM_TREES, min_samples_leaf=_MIN_LEAF, max_features=_SHARE, max_depth=_MAX_DEPTH,
        random_state=seed,
    ).fit(rows, truth)  # fmt: skip
    roots, tables, at = [], [], 0
    for each in trees.estimators_:
        table = _table(each.tree_, at, lambda counts: _share_of(counts, trees.classes_))
        roots.append(at)
        tables.append(table)
        at += len(table)
    linear = fit_scorer(samples, good, penalty)
    return Forest.of_nodes(linear, np.array(roots, "<u4"), np.concatenate(tables))


def _share_of(counts: NDArray[np.float64], classes: NDArray[Any]) -> NDArray[np.float64]:
    """Return the share of good samples in each node."""
    good = (counts * classes).sum(axis=-1)
    share: NDArray[np.float64] = good / counts.sum(axis=-1)
    return share


def _table(
    tree: Any, at: int, share: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[Any]:
    """Return the nodes of one of scikit-learn's trees, which begins at row ``at``."""
    table = np.zeros(tree.node_count, _NODE)
    own = np.arange(tree.node_count)
    leaf = tree.children_left < 0
    table["value"] = np.where(leaf, 0, tree.feature)
    table["threshold"] = tree.threshold
    table["left"] = at + np.where(leaf, own, tree.children_left)
    table["right"] = at + np.where(leaf, own, tree.children_right)
    table["share"] = share(tree.value[:, 0, :])
    return table
