"""Sequences of different lengths: packed, padded to a few lengths, and batches of several shapes as one source."""

import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_close, assert_trees_equal
from tsunax.data.cursors import as_source
from tsunax.errors import DataError, HyperparameterError, WrongTypeError

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(1, 50, n).astype(np.int32) for n in RNG.integers(1, 33, 200)]


def test_each_sequence_is_in_the_row_that_had_the_least_room_for_it():
    numbered = [np.full(len(text), i) for i, text in enumerate(TEXTS)]
    packed = ts.data.pack(numbered, 48)
    rows = {}
    for row, (values, segments, positions) in enumerate(zip(*packed, strict=True)):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert np.all(np.diff(at) == 1) and positions[at].tolist() == list(range(len(at)))
            (i,) = set(values[at])
            assert len(at) == len(TEXTS[i])
            rows[i] = row
        assert not values[segments == 0].any()
    room = np.full(len(packed.values), 48)
    for i, text in enumerate(TEXTS):
        assert room[rows[i]] == min(x for x in room if x >= len(text))
        room[rows[i]] -= len(text)
    assert packed.values.shape[0] < 1.1 * sum(map(len, TEXTS)) / 48


def test_many_sequences_are_packed_in_no_time():
    lengths = RNG.integers(1, 500, 20_000)
    packed = ts.data.pack([np.ones(n, np.int8) for n in lengths], 512)
    assert packed.values.sum() == lengths.sum() and packed.values.mean() > 0.95


def test_many_rows_of_one_room_are_packed_in_no_time():
    start = time.thread_time()
    packed = ts.data.pack([np.ones(2, np.int8)] * 200_000, 3)  # no row takes a second one
    assert len(packed.values) == 200_000 and time.thread_time() - start < 10


def averages(params, tokens, segments):
    """A loss for each token that looks at the mean of its own segment."""
    x = params["table"][tokens]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
    mean = jnp.einsum("rij,rjd->rid", same.astype(x.dtype), x) / jnp.maximum(same.sum(-1), 1)[..., None]
    return jnp.sum((x - mean @ params["mix"]) ** 2, -1)


@pytest.mark.medium
def test_the_gradient_of_packed_sequences_is_that_of_each_alone():
    """However they are packed or padded, cut into micro-batches and weighted."""
    keys = jax.random.split(jax.random.key(0))
    params = {"table": jax.random.normal(keys[0], (50, 4)), "mix": jax.random.normal(keys[1], (4, 4))}
    state = ts.setup(ts.rules.sgd(0.1), params)

    def of_packed(params, batch):
        return ts.Loss.mean(averages(params, batch.values, batch.segments), batch.segments > 0)

    def of_padded(params, batch):
        segments = batch.mask.astype(jnp.int32)
        return ts.Loss.mean(averages(params, batch.values, segments), batch.mask)

    packed = ts.data.pack(TEXTS, 48)
    rows = -len(packed.values) % 4  # whole micro-batches: rows without a token weigh nothing
    packed = jax.tree.map(lambda x: np.concatenate([x, np.zeros((rows, *x.shape[1:]), x.dtype)]), packed)
    loss, grads = ts.value_and_grad(of_packed)(state, packed)
    cut_loss, cut = ts.value_and_grad(of_packed, accumulate=4)(state, packed)
    (padded,) = ts.data.pad(TEXTS, [32]).values()
    whole_loss, whole = ts.value_and_grad(of_padded)(state, padded)
    assert loss.weight == whole_loss.weight == sum(map(len, TEXTS))
    np.testing.assert_allclose([loss.compute(), cut_loss.compute()], whole_loss.compute(), rtol=1e-6)
    assert_trees_close(grads, whole, rtol=1e-5, atol=1e-6)
    assert_trees_close(cut, whole, rtol=1e-5, atol=1e-6)


def test_each_sequence_is_padded_to_the_least_length():
    parts = ts.data.pad(TEXTS, [32, 8, 16])
    assert list(parts) == [8, 16, 32] and sum(len(x.values) for x in parts.values()) == len(TEXTS)
    for n, x in parts.items():
        lengths = x.mask.sum(1)
        assert x.values.shape[1] == n and lengths.max() <= n and lengths.min() > {8: 0, 16: 8, 32: 16}[n]
    assert list(ts.data.pad([[1], [2]], [4, 8])) == [4]


class Pair(NamedTuple):
    tokens: np.ndarray
    label: int


LABELED = {  # how records are made of a text and its number, and how their parts are found in a tree
    "pair": (lambda text, i: (text, i), lambda x: (x[0], x[1])),
    "lists": (lambda text, i: (text.tolist(), i), lambda x: (x[0], x[1])),
    "dict": (lambda text, i: {"label": i, "tokens": text}, lambda x: (x["tokens"], x["label"])),
    "NamedTuple": (lambda text, i: Pair(text, i), lambda x: (x.tokens, x.label)),
    "nested": (lambda text, i: ({"a": text, "none": None}, [i, -i]), lambda x: (x[0]["a"], x[1][..., 0])),
}


@pytest.mark.parametrize("name", LABELED)
def test_records_are_padded_with_what_they_have_once(name):
    make, parts_of = LABELED[name]
    parts = ts.data.pad([make(text, i) for i, text in enumerate(TEXTS)], [32, 8, 16])
    alone = ts.data.pad(TEXTS, [8, 16, 32])
    assert list(parts) == list(alone) and sum(len(x.mask) for x in parts.values()) == len(TEXTS)
    for n, part in parts.items():
        tokens, labels = parts_of(part.values)
        np.testing.assert_array_equal(tokens, alone[n].values)
        np.testing.assert_array_equal(part.mask, alone[n].mask)
        assert labels.tolist() == part.indices.tolist() == alone[n].indices.tolist()
        assert part.indices.dtype == np.int32 and np.all(np.diff(part.indices) > 0)


def test_results_of_shuffled_batches_go_back_into_the_order_of_the_sequences():
    results = np.zeros(len(TEXTS), int)
    for batch in source():
        results[batch.indices] = (batch.values * batch.mask).sum(1)
    assert results.tolist() == [text.sum() for text in TEXTS]


def test_labels_of_tokens_are_padded_and_packed_beside_them():
    records = [
        {"tokens": text, "next": np.roll(text, -1) * 1.0, "embedding": np.ones((len(text), 3))} for text in TEXTS
    ]
    part, packed = ts.data.pad(records, [32])[32], ts.data.pack(records, 48)
    alone, whole = ts.data.pad(TEXTS, [32])[32], ts.data.pack(TEXTS, 48)
    np.testing.assert_array_equal(part.values["tokens"], alone.values)
    np.testing.assert_array_equal(packed.values["tokens"], whole.values)
    assert part.values["embedding"].shape == (len(TEXTS), 32, 3) and part.values["next"].dtype == float
    for i in range(1, whole.segments.max() + 1):
        for row, segment in zip(packed.values["next"], packed.segments == i, strict=True):
            tokens = packed.values["tokens"][np.all(packed.values["next"] == row, axis=1)][0]
            np.testing.assert_array_equal(row[segment], np.roll(tokens[segment], -1))


def test_the_leaves_that_are_sequences_are_named_where_lengths_do_not_tell():
    """A vector of three features is no sequence, whatever the lengths of the others are."""
    records = [{"tokens": np.arange(3), "features": np.ones(3), "label": 7}] * 2
    part = ts.data.pad(records, [4], where="tokens")[4]
    assert {name: x.shape for name, x in part.values.items()} == {"tokens": (2, 4), "features": (2, 3), "label": (2,)}
    assert part.mask.tolist() == [[True] * 3 + [False]] * 2
    part = ts.data.pad(records, [4], where=["*", "!label"])[4]
    assert {name: x.shape for name, x in part.values.items()} == {"tokens": (2, 4), "features": (2, 4), "label": (2,)}
    named = ts.data.pad([*records, {"tokens": np.arange(2), "features": np.ones(3), "label": 0}], [2, 4])
    assert named[4].values["features"].shape == (2, 3)
    text = r"got dict with tokens, features, label, expected arrays of different lengths. Name the leaves"
    with pytest.raises(DataError, match=text):
        ts.data.pad(records, [4])
    assert ts.data.pad([(np.arange(3), 7)], [4])[4].values[0].tolist() == [[0, 1, 2, 0]]
    assert ts.data.pad([(1, 2, 3)], [4])[4].values.tolist() == [[1, 2, 3, 0]]  # a tuple of numbers is an array
    assert ts.data.pack([(np.arange(3), np.ones(3))], 4).values[1].tolist() == [[1, 1, 1, 0]]


def source(shuffle=True, seed=3):
    parts = ts.data.pad(TEXTS, [8, 16, 32])
    return ts.data.interleave([ts.batches(x, 128 // n, shuffle=shuffle, seed=1) for n, x in parts.items()], seed)


def test_an_epoch_has_each_batch_of_each_part():
    data, again = source(), source()
    seen = [batch.values.shape for batch in data]
    assert len(seen) == len(data) and sum(shape[0] for shape in seen) == len(TEXTS)
    assert {shape[1] for shape in seen} == {8, 16, 32} and seen != sorted(seen)
    assert [batch.values.shape for batch in again] == seen
    assert [batch.values.shape for batch in again] != seen  # another epoch, another order
    texts = {tuple(row[mask]) for batch in source() for row, mask in zip(batch.values, batch.mask, strict=True)}
    assert texts == {tuple(text) for text in TEXTS}


@pytest.mark.parametrize("at", [0, 1, 17])
def test_it_goes_on_at_any_batch(at):
    data, again = source(), source()
    expected = [*data, *data]
    reader = iter(again)
    for _ in range(at):
        next(reader)
    other = source()
    other.set_state(again.get_state())
    rest = [*other, *other][: len(expected) - at]
    for ours, theirs in zip(rest, expected[at:], strict=True):
        assert_trees_equal(ours, theirs)
    with pytest.raises(DataError, match="position at most"):
        other.set_state({"epoch": 0, "position": 1000})


@pytest.mark.medium
def test_a_run_compiles_once_for_each_shape_and_resumes(tmp_path):
    def loss_fn(params, batch):
        return ts.Loss.mean((batch.values * params["w"] - 1.0) ** 2, batch.mask)

    make = lambda: (ts.train_step(loss_fn), ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(())}))
    step, state = make()
    checkpoint = ts.Checkpoints(tmp_path, every=11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once, _ = ts.fit(step, state, source(), steps=40, progress=False)
        assert len(step.traces) <= 2 * 4  # three shapes and their short batches, one of which is a shape
        step, state = make()
        ts.fit(step, state, source(), steps=25, checkpoint=checkpoint, progress=False)
        step, state = make()
        resumed, _ = ts.fit(step, state, ts.prefetch(source()), steps=40, checkpoint=checkpoint, progress=False)
    assert_trees_equal(resumed.params, once.params)
    with pytest.raises(DataError, match="seed"):
        step, state = make()
        ts.fit(step, state, source(seed=4), steps=50, checkpoint=checkpoint, progress=False)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ts.data.pack([], 4), r"^sequences at pack\(\): got none, expected one at least"),
        (lambda: ts.data.pack([[1], [1, 2, 3]], 2), r"^sequences\[1\] at pack\(\): got int64\[3\], expected arrays as in sequences\[0\], of one length from 1 to 2"),
        (lambda: ts.data.pack([[1], []], 2), r"got float64\[0\], expected arrays as in sequences"),
        (lambda: ts.data.pack([[1], [1.0]], 2), r"^sequences\[1\] at pack\(\): got float64"),
        (lambda: ts.data.pad([[1, 2]], [1]), r"^sequences\[0\] at pad\(\): got int64\[2\], expected .* from 1 to 1"),
        (lambda: ts.data.pad([[1, 2]], []), r"got int64\[2\], expected .* from 1 to 0"),
        (lambda: ts.data.pad([([1], [1, 2]), ([1, 2], [1])], [2]), r"^sequences\[0\] at pad\(\): got tuple of 2, expected arrays .* of one length"),
        (lambda: ts.data.pad([([1], 2), ([1, 2], 2.0)], [2]), r"^sequences\[1\] at pad\(\): got tuple of 2, expected arrays as in"),
        (lambda: ts.data.pad([(1, np.float32(2)), 3], [2]), r"^sequences\[1\] at pad\(\): got int64\[\], expected arrays as in"),
        (lambda: ts.data.pad([3, [1, 2]], [2]), r"^sequences\[0\] at pad\(\): got int64\[\], expected"),
        (lambda: ts.data.pack([([1, 2], 0), ([1], 1)], 4), r"^sequences\[0\] at pack\(\): got tuple of 2, expected one value for each token."),
        (lambda: ts.data.interleave([]), r"^parts at interleave\(\): got none"),
        (lambda: ts.data.interleave([ts.batches(np.ones(2), 1)], -1), r"^seed at interleave\(\): got -1, expected an int ≥ 0"),
        (lambda: ts.data.interleave([[np.ones(2)]]), r"^parts\[0\] at interleave\(\): got list of 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_told(call, text):
    with pytest.raises((DataError, HyperparameterError, WrongTypeError), match=text):
        call()


def test_a_cursor_takes_runs_of_one_shape():
    cursor, shapes = as_source(source()), []
    while (chunk := cursor.take(4)) is not None:
        shapes.append(chunk.values.shape)
    assert sum(shape[0] for shape in shapes) == len(source()) and max(shape[0] for shape in shapes) > 1


def test_pad_to_one_length():
    (found,) = ts.data.pad([np.ones(3)], 8).values()
    assert found.tokens.shape == (1, 8) if hasattr(found, "tokens") else found[0].shape == (1, 8)
