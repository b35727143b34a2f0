"""Batches in the order of (seed, epoch), from any place; prefetched without a thread left; any iterable as data."""

import functools
import gc
import itertools
import pathlib
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, need
from tsunax._core import processes
from tsunax.data import order
from tsunax.data.batching import batches
from tsunax.data.checks import check_batch
from tsunax.data.cursors import as_source
from tsunax.data.on_devices import gather
from tsunax.data.packing import interleave
from tsunax.data.prefetching import prefetch
from tsunax.errors import DataError, HyperparameterError, ParamsError, WrongTypeError

N = 23
ARRAYS = {"x": np.arange(N * 3, dtype=np.float32).reshape(N, 3), "y": (np.arange(N, dtype=np.int8), None)}


def order_of(seed, epoch, n):
    """By 64 random bits, of which the low ones make room for the place: by a stable argsort."""
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(words >> np.uint64((n - 1).bit_length()), kind="stable")


def by_hand(epochs, size, drop=False, order=lambda epoch: np.arange(N)):
    rows = [order(e)[i : i + size] for e in epochs for i in range(0, N, size)]
    return [jax.tree.map(lambda x: x[r], ARRAYS) for r in rows if len(r) == size or not drop]  # noqa: B023


def assert_same(got, expected):
    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert_trees_equal(a, b)


def epochs_of(data, n):
    return [batch for _ in range(n) for batch in data]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("tsunax-prefetch")]


# --- order, structure, place ------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_numpy_indexing(shuffle, drop):
    settings = {"shuffle": shuffle}
    order = lambda e: order_of(5, e, N) if shuffle else np.arange(N)
    data = batches(ARRAYS, 4, seed=5, drop_remainder=drop, **settings)
    expected = by_hand(range(3), 4, drop, order)
    assert len(data) * 3 == len(expected)
    assert_same(epochs_of(data, 3), expected)
    assert [data.order(e).tolist() for e in (0, 7)] == [order(e).tolist() for e in (0, 7)]
    assert_same(batches(ARRAYS, 100, seed=5, **settings), by_hand([0], 100, order=order))


def test_the_order_never_changes():
    # Runs are resumed with it: if this fails, a checkpoint of an older version goes on with other batches.
    data = batches(np.arange(10), 2, shuffle=True, seed=2**40)
    assert data.order(3).tolist() == [3, 8, 6, 7, 5, 0, 1, 2, 9, 4]
    orders = np.array([batches(np.arange(4), 1, shuffle=True, seed=s).order(e) for s in range(60) for e in range(40)])
    counts = np.array([(orders == i).sum(0) for i in range(4)])  # of 2400: 600 each, 21 is a standard deviation
    assert (np.sort(orders, 1) == np.arange(4)).all() and np.abs(counts - 600).max() < 100


# --- epochs of more rows than are sorted ----------------------------------------------------


def test_the_order_of_a_long_epoch_never_changes():
    # as test_the_order_never_changes, of the permutation that needs no sort
    n = 5_000_000
    data = batches(np.broadcast_to(np.int8(0), n), 8, shuffle=True, seed=2**40)
    assert data.order(3)[:8].tolist() == [1770646, 3508081, 978520, 3331444, 2032030, 2058823, 1216262, 466676]
    assert (np.sort(data.order(3)) == np.arange(n)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 1000, 4097])
def test_a_permutation_of_numbers(n):
    seen = {tuple(order.permutation(n, seed, epoch)(np.arange(n)).tolist()) for seed in range(5) for epoch in range(5)}
    assert all(sorted(found) == list(range(n)) for found in seen)
    assert len(seen) == (25 if n >= 64 else len(seen))


def test_a_permutation_looks_drawn():
    # chi-squared over places x values, over steps between neighbors, and over two epochs: 4 standard deviations
    n, cells = 1 << 20, 64
    e = n / cells**2
    one, two = (order.permutation(n, 7, epoch)(np.arange(n)).astype(np.int64) for epoch in (0, 1))
    for a, b in [(np.arange(n), one), (one, two), (one, np.roll(one, 1)), (one % cells, np.roll(one, 1) % cells)]:
        width = (a.max() + 1, b.max() + 1)
        counts = np.bincount(a * cells // width[0] * cells + b * cells // width[1], minlength=cells**2)
        free = (cells - 1) ** 2
        assert abs(((counts - e) ** 2 / e).sum() - free) < 4 * np.sqrt(2 * free)


@pytest.mark.parametrize("count", [1, 3])
def test_a_long_epoch_is_read_in_parts(count, monkeypatch):
    monkeypatch.setattr(order, "SORTED", 100)
    monkeypatch.setattr(order, "AHEAD", 64)
    x = np.arange(1003)
    parts = [batches(x, 12, shuffle=True, seed=4, process=(i, count)) for i in range(count)]
    whole = batches(x, 12, shuffle=True, seed=4, process=(0, 1)).order(2)
    assert sorted(whole.tolist()) == x.tolist() and whole.tolist() != x.tolist()
    for data in parts:
        data.set_state({"epoch": 2, "position": 0})
    for i, shares in enumerate(zip(*parts, strict=True)):  # the last batch is whole on every process
        shares = shares[:1] if parts[0].is_whole else shares
        assert np.concatenate(shares).tolist() == whole[12 * i : 12 * i + 12].tolist()
    for data in parts:
        data.set_state({"epoch": 2, "position": 50})
        assert next(iter(data)).tolist() == data.order(2)[50 * 12 // count :][: 12 // count].tolist()


def test_the_first_batch_of_many_rows_is_there_at_once():
    n = 100_000_000
    data = batches(np.zeros(n, np.int8), 128, shuffle=True)
    tracemalloc.start()
    start = time.process_time()
    next(iter(data))
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1 and peak < 10e6


def test_a_batch_has_memory_of_its_own():
    arrays = np.zeros((8, 2))
    for shuffle in (False, True):
        for batch in batches(arrays, 4, shuffle=shuffle):
            batch += 1
    assert arrays.sum() == 0


@settings(max_examples=25)
@given(size=st.integers(1, 9), place=st.integers(0, 60), shuffle=st.booleans(), drop=st.booleans())
def test_resumes_with_the_next_batch(size, place, shuffle, drop):
    arrays = {"x": ARRAYS["x"], "i": np.arange(N)}
    make = lambda: batches(arrays, size, seed=1, drop_remainder=drop, shuffle=shuffle)
    data, seen, states = make(), [], [make().get_state()]
    for _ in range(4):
        for batch in data:
            seen.append(batch)
            states.append(data.get_state())
    per_epoch = len(seen) // 4
    assert states == [{"epoch": i // per_epoch, "position": i % per_epoch} for i in range(len(seen) + 1)]
    assert all(type(v) is int for s in states for v in s.values())
    place = min(place, 3 * per_epoch)
    data = make()
    data.set_state(states[place])
    assert data.get_state() == states[place]
    assert_same(epochs_of(data, 2)[:per_epoch], seen[place : place + per_epoch])


class _Records:
    """Batches of unknown number that can be read again."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return iter(self.records)


def test_a_loop_that_was_left_is_followed_by_the_next_epoch():
    data = batches(ARRAYS, 4, shuffle=True)
    next(iter(data))
    assert data.get_state() == {"epoch": 0, "position": 1}
    again = batches(ARRAYS, 4, shuffle=True)
    again.set_state({"epoch": 1, "position": 0})
    assert_same(data, again)
    data.set_state({"epoch": 0, "position": 2})
    assert len(list(data)) == len(data) - 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "rows, size, n", [(N, 6, 2), (N, 6, 3), (N, 8, 4), (9, 8, 8), (3, 16, 8), (13, 8, 2), (14, 8, 2)]
)
@pytest.mark.parametrize("kind", ["arrays", "taken", "prefetched"])
def test_processes_share_a_batch(rows, size, n, shuffle, kind):
    arrays = jax.tree.map(lambda x: x[:rows], ARRAYS)

    def given_out(i):
        data, parts = batches(arrays, size, process=(i, n), shuffle=shuffle), []
        source = as_source(prefetch(data) if "prefetched" in kind else data)
        while (chunk := source.take(2) if kind == "taken" else source.next()) is not None:
            chunk = chunk if kind == "taken" else jax.tree.map(lambda x: x[None], chunk)
            parts += [(jax.tree.map(lambda x, j=j: x[j], chunk), source.is_whole) for j in range(len(chunk["x"]))]
        return parts

    whole = list(batches(arrays, size, shuffle=shuffle))
    shares = [given_out(i) for i in range(n)]
    assert {len(share) for share in shares} == {len(whole)}
    for batch, *parts in zip(whole, *shares, strict=True):
        here = len(batch["x"])
        assert {is_whole for _, is_whole in parts} == {here % n > 0}
        parts = [part for part, _ in parts]
        if here % n:
            [assert_trees_equal(part, batch) for part in parts]
        else:
            assert_trees_equal(jax.tree.map(lambda *x: np.concatenate(x), *parts), batch)
            assert {len(part["x"]) for part in parts} == {here // n}


def test_a_process_has_its_own_part_by_default(monkeypatch):
    monkeypatch.setattr(processes.Alone, "index", 2)
    monkeypatch.setattr(processes.Alone, "count", 3)
    mine, part = batches(ARRAYS, 6, shuffle=True), batches(ARRAYS, 6, shuffle=True, process=(2, 3))
    assert_same(epochs_of(mine, 2), epochs_of(part, 2))
    rows = len(ARRAYS["x"])
    assert (mine.share, mine.tail_rows) == (2, rows % 6) and rows % 6
    assert batches(ARRAYS, 6, drop_remainder=True).tail_rows == 0


# --- many at once, on the device --------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_that_are_on_a_device_stay_there(shuffle):
    """One of several CPU devices counts as an accelerator does."""
    there = jax.devices()[3]
    expected = [*batches(ARRAYS, 5, shuffle=shuffle)]
    for arrays in (ts.to_device(ARRAYS, there), {**ARRAYS, "x": ts.to_device(ARRAYS["x"], there)}):
        data = batches(arrays, 5, shuffle=shuffle)
        got = [*data]
        assert all(x.devices() == {there} for x in jax.tree.leaves(got)) and data.resident is not None
        assert_same(got, expected)
    free = jax.tree.map(jnp.asarray, ARRAYS)  # where JAX puts them by default: on the CPU that is the host
    assert all(isinstance(x, np.ndarray) for batch in batches(free, 5) for x in jax.tree.leaves(batch))


def test_records_that_are_on_a_device_stay_there():
    class Placed:
        __len__ = lambda self: N
        __getitem__ = lambda self, i: {"x": there[i], "i": i, "free": jnp.float32(i)}

    there = ts.to_device(ARRAYS["x"], jax.devices()[3])
    for batch, expected in zip(batches(Placed(), 5, shuffle=True), batches(ARRAYS, 5, shuffle=True), strict=True):
        assert batch["x"].devices() == {jax.devices()[3]} and isinstance(batch["free"], np.ndarray)
        np.testing.assert_array_equal(batch["x"], expected["x"])


def test_arrays_on_the_cpu_are_on_the_host_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for arrays in (ts.to_device(ARRAYS, jax.devices()[3]), jax.tree.map(jnp.asarray, ARRAYS)):
        assert batches(arrays, 5).resident is None


def test_arrays_on_several_devices_are_read_back_with_a_warning():
    mesh = ts.mesh(devices=jax.devices()[:2])
    spread = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))
    apart = [ts.to_device(np.arange(8), device) for device in jax.devices()[:2]]
    for arrays in (spread, apart):
        with pytest.warns(UserWarning, match=r"those on 2 devices are read back .* batches\(\.\.\., device=mesh\)"):
            data = batches(arrays, 4)
        assert jax.tree.leaves([*data])[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["host", "device", "mesh"])
def test_training_on_arrays_of_a_device_has_the_bits_of_training_on_the_host(where):
    rows, there = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32), jax.devices()[1]
    states = []
    for arrays in ({"x": rows}, ts.to_device({"x": rows}, there)):
        state = ts.setup(ts.rules.adam(0.1), {"w": np.ones(2, np.float32)}, device=there if where == "device" else None)
        state = ts.shard(state, ts.mesh(devices=jax.devices()[:2])) if where == "mesh" else state
        data = batches(arrays, 4, shuffle=True)
        states.append(ts.fit(STEP, state, data, steps=6, progress=False)[0])
    assert_trees_equal(states[0].params, states[1].params)


@pytest.mark.parametrize("device", [None, True])
def test_take_stacks_the_next_batches(device):
    one, many = batches(ARRAYS, 5, shuffle=True, device=device), batches(ARRAYS, 5, shuffle=True, device=device)
    many.set_state({"epoch": 2, "position": 1})
    one.set_state({"epoch": 2, "position": 1})
    taken, it, places = [], iter(many), []
    while (chunk := it.take(2)) is not None:
        taken += [jax.tree.map(lambda x, i=i: np.asarray(x)[i], chunk) for i in range(len(chunk["x"]))]
        places.append(many.get_state())
    assert_same(taken, one)
    assert places == [{"epoch": 2, "position": 3}, {"epoch": 2, "position": 4}, {"epoch": 3, "position": 0}]
    assert next(it, None) is None


def test_resident_batches_are_the_host_batches():
    mesh = jax.make_mesh((4,), ("data",))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    arrays = jax.tree.map(lambda x: x[:20], ARRAYS)
    here = jax.devices()[3]
    for options, devices in (
        ({"shuffle": True}, (True, spread)),
        ({}, (here, mesh)),
        ({"shuffle": True, "process": (1, 2)}, (True,)),
    ):
        expected = epochs_of(batches(arrays, 8, **options), 2)
        for device in devices:
            data = batches(arrays, 8, device=device, **options)
            assert_same(epochs_of(data, 2), expected)
            x = next(iter(data))["x"]
            if device is spread or device is mesh:
                assert x.sharding.is_equivalent_to(spread, 2) and data.resident["x"].sharding.is_fully_replicated
            else:
                assert x.devices() == {jax.devices()[0] if device is True else here}
            with count_compiles() as c:
                epochs_of(data, 1)
            assert c.compiles == 0


def test_a_fused_epoch_is_the_plain_one():
    data = batches(ARRAYS, 4, shuffle=True, seed=9, device=True, drop_remainder=True)

    @jax.jit
    def run(resident, order):
        one = lambda total, i: (total * 2 + gather(resident, order, i * 4, (4,))["x"].sum(), None)
        return jax.lax.scan(one, jnp.float32(0), jnp.arange(len(data)))[0]

    total = 0.0
    for batch in by_hand([1], 4, "drop", lambda e: order_of(9, e, N)):
        total = total * 2 + float(batch["x"].sum())
    assert float(run(data.resident, data.device_order(1))) == total  # integers: exact in float32
    for epoch in (1, 0):
        assert data.order(epoch).tolist() == np.asarray(data.device_order(epoch)).tolist()


# --- arrays that are not NumPy's --------------------------------------------------------------


class _File:
    """As h5py: increasing rows or a slice, nothing else."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, rows):
        assert isinstance(rows, slice) or (np.diff(rows) > 0).all()
        return self._array[rows]


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_in_files(tmp_path, shuffle):
    x = ARRAYS["x"]
    expected = list(batches(x, 4, shuffle=shuffle))
    mapped = np.memmap(tmp_path / "x.bin", x.dtype, "w+", shape=x.shape)
    mapped[:] = x
    got = list(batches({"map": mapped, "file": _File(x), "jax": jnp.asarray(x)}, 4, shuffle=shuffle))
    for name in ("map", "file", "jax"):
        assert_same([batch[name] for batch in got], expected)
        assert all(type(batch[name]) is np.ndarray for batch in got)


# --- records by number ------------------------------------------------------------------------


class _Dataset:
    """As a map-style Dataset of torch: records by number, each from code that knows one of them."""

    def __init__(self, kind="dict", n=N):
        self.kind, self.n, self.read = kind, n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(int(i))
        x, y = ARRAYS["x"][i][::-1], ARRAYS["y"][0][i]  # a flip that would turn an array of rows
        return {"dict": {"x": x, "y": y}, "tuple": (x, int(y)), "array": x, "number": float(y)}[self.kind]


class _ListLike(list):
    """Records in a class of one's own, that can be iterated too."""


COLUMNS = {"x": ARRAYS["x"][:, ::-1], "y": ARRAYS["y"][0]}
AS_ARRAYS = {"dict": COLUMNS, "array": COLUMNS["x"], "number": COLUMNS["y"].astype(float)}
AS_ARRAYS["tuple"] = (COLUMNS["x"], COLUMNS["y"].astype(int))


@pytest.mark.parametrize("kind", AS_ARRAYS)
def test_a_data_set_of_records_is_read_record_by_record(kind):
    options = {}, {"shuffle": True}, {"shuffle": True, "drop_remainder": True}
    for option in options:
        for process in ((0, 1), (1, 2)):
            given = {**option, "seed": 3, "process": process}
            expected = epochs_of(batches(AS_ARRAYS[kind], 4, **given), 2)
            assert_same(epochs_of(batches(_Dataset(kind), 4, **given), 2), expected)
    data = batches(_Dataset(kind), 4, shuffle=True)
    data.set_state({"epoch": 1, "position": 3})
    expected = epochs_of(batches(AS_ARRAYS[kind], 4, shuffle=True), 2)
    assert_same(data, expected[len(data) + 3 :])
    assert len(data) == 6 and not data.is_of_arrays
    taken = iter(batches(_Dataset(kind), 4, shuffle=True)).take(3)
    assert_trees_equal(taken, jax.tree.map(lambda *x: np.stack(x), *expected[:3]))


def test_records_among_columns_and_in_lists():
    flipped = [(x[::-1], int(y)) for x, y in zip(ARRAYS["x"], ARRAYS["y"][0], strict=True)]
    expected = epochs_of(batches(AS_ARRAYS["tuple"], 4, shuffle=True), 1)
    assert_same(batches(_ListLike(flipped), 4, shuffle=True), expected)
    got = batches({"a": _Dataset("array"), "b": COLUMNS["y"].astype(int)}, 4, shuffle=True)
    assert_same([(b["a"], b["b"]) for b in got], expected)


def test_a_mask_is_not_dropped():
    masked = np.ma.masked_array(np.array([1, 1000], np.float32), [False, True])
    stored = _File(np.ma.masked_array(np.ones((4, 2), np.float32), [[0, 0], [0, 1], [0, 0], [0, 0]]))
    cases = {
        "arrays": lambda: batches({"x": masked}, 1),
        "records": lambda: batches(_Odd([{"x": np.ones(2, np.float32)}, {"x": masked}]), 2),
        "file": lambda: batches({"x": stored}, 4, shuffle=True),
        "loader": lambda: prefetch([{"x": masked}]),
    }
    for name, make in cases.items():
        with pytest.raises(DataError) as raised:
            list(make())
        assert "got a masked array, expected an array, and beside it its mask" in str(raised.value), name


def test_records_are_read_when_they_are_needed():
    dataset = _Dataset()
    source = as_source(batches(dataset, 4))
    assert dataset.read == []
    source.next(), source.take(2)
    assert dataset.read == list(range(12))
    list(itertools.islice(prefetch(batches(dataset, 4)), 3))
    assert sorted(set(dataset.read)) == list(range(max(dataset.read) + 1))


class _Odd(_Dataset):
    def __init__(self, records, **attributes):
        super().__init__(n=len(records))
        self.records = records
        self.__dict__ |= attributes

    def __getitem__(self, i):
        return self.records[i]


class _Ending(_Dataset):
    def __getitem__(self, i):
        raise StopIteration


class _Columns(dict):
    """As the arrays of an .npz file: a mapping of which JAX does not know."""


RECORDS = {
    "shapes": (
        lambda: _Odd([{"x": np.ones(2)}, {"x": np.ones(3)}]),
        "data at record 1: got ValueError all input arrays must have the same shape, expected a tree of arrays and "
        "numbers like record 0.",
    ),
    "structure": (lambda: _Odd([{"x": 1}, {"z": 1}]), "data at record 1: got ValueError"),
    "error": (lambda: _Odd({0: 1.0}, n=2), "data at record 1: got KeyError 1, expected a record."),
    "end": (lambda: _Ending(), "data at record 0: got StopIteration, expected a record."),
    "None": (lambda: _Odd([None, None]), "record: got None, expected a tree of arrays"),
    "empty": (lambda: _Odd([]), "arrays: got 0 rows in arrays, expected at least 1 row"),
    "mapping": (
        lambda: _Columns(x=np.ones(2)),
        "leaf at arrays: got a _Columns, expected arrays. Columns in a dict: {name: np.asarray(table[name]), ...}.",
    ),
    "frame": (lambda: _Odd([1, 2], columns=["a"]), "leaf at arrays: got a _Odd, expected arrays. Columns in a dict:"),
    "list": (
        lambda: [{"x": np.ones(2), "y": 1}] * 2,
        "leaf at arrays[0]['y']: got 1 (int), expected an array with rows. Leave it out of the arrays: step(state, ",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_wrong_records(name):
    make, text = RECORDS[name]
    with pytest.raises(DataError) as raised:
        next(iter(batches(make(), 2)))
    assert str(raised.value).startswith(text)


def test_typed_keys_are_data():
    keys = jax.random.split(jax.random.key(0), 8)
    bits = np.asarray(jax.random.key_data(keys))
    records = _Odd([{"key": key, "x": 1.0} for key in keys])
    for make in (lambda **o: batches({"key": keys}, 3, **o), lambda **o: batches(records, 3, **o)):
        for options in ({}, {"shuffle": True, "seed": 1}):
            expected = epochs_of(batches({"key": bits}, 3, **options), 2)
            found = [jax.random.key_data(batch["key"]) for batch in epochs_of(make(**options), 2)]
            assert_same([{"key": np.asarray(x)} for x in found], expected)
    noise = lambda params, batch: jnp.mean((params["w"] - jax.vmap(jax.random.normal)(batch["key"])) ** 2)
    step, rule = ts.train_step(noise), ts.rules.sgd(0.1)
    state = ts.setup(rule, {"w": jnp.zeros(())})
    for i in (0, 4, 0):
        state, _ = step(state, {"key": keys[i : i + 4]})
    for data in (
        batches({"key": keys}, 4),
        prefetch(batches({"key": keys}, 4)),
        batches({"key": keys}, 4, device=True),
    ):
        found, _ = ts.fit(step, ts.setup(rule, {"w": jnp.zeros(())}), data, steps=3, progress=False)
        assert_trees_equal(found.params, state.params)


def test_a_series_of_pandas_is_no_array_of_labels():
    class Series(_File):
        """Indexed by labels, here those of another order."""

        iloc = None
        __array__ = lambda self, dtype=None, copy=None: self._array
        __len__ = lambda self: len(self._array)
        __getitem__ = lambda self, labels: self._array[::-1][labels]

    assert_same(batches(Series(ARRAYS["x"]), 4), [ARRAYS["x"][i : i + 4] for i in range(0, N, 4)])


# --- values that JAX would change ---------------------------------------------------------------


IDS = np.array([3, 2**40, 5])
CUT = {  # what is given, what is said
    "int64": (IDS, "int64 values from 3 to 1099511627776, expected what int32"),
    "negative": (-IDS, "int64 values from -1099511627776 to -3, expected what int32"),
    "uint64": (IDS.astype(np.uint64), "uint64 values from 3 to 1099511627776, expected what uint32"),
    "float64": (np.array([1.0, np.nan, 1e300]), "float64 values from 0.0 to 1e+300, expected what float32"),
}


@pytest.mark.parametrize("name", CUT)
def test_values_that_a_cast_would_change(name, tmp_path):
    x, text = CUT[name]
    fine = {"y": np.arange(3), "z": np.array([np.inf, np.nan, -3e38])}
    fine["e"] = np.arange(6, dtype=np.uint64).reshape(3, 2)
    tree = {**fine, "x": x}
    stored = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
    stored[:] = x
    cases = {
        "arrays['x']: got ": lambda: batches(tree, 3),
        "batch['x'], batch 1 of epoch 0: got ": lambda: [*as_source([fine, tree])],
        "batch['x'], one of batches 0 to 1 of epoch 0: got ": lambda: as_source([{"x": x}, {"x": x}]).take(2),
        "batch['x'], rows 0 to 2 of an epoch: got ": lambda: [*batches({"x": stored}, 3)],
    }
    for where, make in cases.items():
        with pytest.raises(DataError) as raised:
            make()
        assert str(raised.value).startswith("leaf at " + where + text), where
    assert len(list(batches(fine, 2))) == 2 and len(as_source([fine, fine]).take(2)["y"]) == 2
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert len(list(batches(tree, 3))) == 1


ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
STEP = ts.train_step(lambda params, batch, scale=1.0: jnp.mean((batch["x"] @ params["w"]) ** 2) * scale)
SCORE = ts.eval_step(STEP.loss_fn)


def fresh(w=None, **options):
    return ts.setup(ts.rules.sgd(0.0), {"w": np.ones(2, np.float32) if w is None else w}, **options)


def corner(x):
    return x[1:2, 1].reshape(())  # x[1, 1] has the machine's byte order


REFUSED = {  # a function of the argument, its path
    "step": (lambda x: STEP(fresh(), {"x": x}), "batch['x']"),
    "step, no loop": (lambda x: fit_once([{"x": x}], steps_per_call=None), "batch['x'], batch 0 of epoch 0"),
    "step on a mesh": (lambda x: STEP(ts.shard(fresh(), ts.mesh(devices=jax.devices()[:2])), {"x": x}), "batch['x']"),
    "argument": (lambda x: STEP(fresh(), {"x": ROWS}, scale=corner(x)), "extra['scale']"),
    "eval_step": (lambda x: SCORE(fresh(), {"x": x}), "batch['x']"),
    "evaluate": (lambda x: ts.evaluate(SCORE, fresh(), [{"x": x}]), "batch['x'], batch 0 of epoch 0"),
    "its argument": (lambda x: ts.evaluate(SCORE, fresh(), [{"x": ROWS}], scale=corner(x)), "extra['scale']"),
    "fit": (lambda x: fit_once([{"x": x}]), "batch['x'], batch 0 of epoch 0"),
    "value_and_grad": (lambda x: ts.value_and_grad(STEP.loss_fn)(fresh(), {"x": x}), "batch['x']"),
    "fit, later": (
        lambda x: fit_once([{"x": ROWS}, {"x": x}], steps=2),
        "batch['x'], one of batches 1 to 1 of epoch 0",
    ),
    "its extra": (lambda x: fit_once([{"x": ROWS}], extra={"scale": corner(x)}), "extra['scale']"),
    "prefetch": (lambda x: [*prefetch([{"x": x}], jax.devices()[0])], "batch['x'], batch 0 of epoch 0"),
    "iterate": (
        lambda x: next(ts.loop.iterate(STEP, fresh(), [{"x": x}], steps=1)),
        "batch['x'], one of batches 0 to 0 of epoch 0",
    ),
    "run_steps": (lambda x: ts.loop.run_steps(STEP, fresh(), {"x": x[None]}), "batches['x']"),
    "its scale": (lambda x: ts.loop.run_steps(STEP, fresh(), {"x": ROWS[None]}, scale=corner(x)), "extra['scale']"),
    "run_epoch": (lambda x: ts.loop.run_epoch(STEP, fresh(), [{"x": ROWS}], scale=corner(x)), "extra['scale']"),
    "batches": (lambda x: batches({"x": x}, 3), "arrays['x']"),
    "batches there": (lambda x: batches({"x": x}, 3, device=True), "arrays['x']"),
    "params": (lambda x: fresh(x), "params['w']"),
    "frozen params": (lambda x: ts.setup(ts.rules.sgd(0.1), {"w": ROWS, "v": x}, trainable="w"), "params['v']"),
    "model_state": (lambda x: fresh(model_state={"m": x}), "model_state['m']"),
}


BY_JAX = ("step", "step on a mesh", "argument", "eval_step", "value_and_grad")  # it names what it cannot take


def fit_once(data, steps=1, **options):
    return ts.fit(STEP, fresh(), data, steps=steps, progress=False, **options)


@pytest.mark.parametrize("dtype", [">f4", "g", "m8[s]"])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_jax_does_not_have_are_refused_by_their_path(name, dtype):
    """Those of another byte order also after a native batch of the shape: jit would take its program."""
    call, path = REFUSED[name]
    if dtype == ">f4" and name != "params":  # whose shape differs
        call(ROWS)
    x = ROWS.astype("i8").astype(dtype)
    with pytest.raises((DataError, ParamsError, TypeError)) as raised:
        call(x)
    is_param = "param" in name
    if type(raised.value) is TypeError:  # JAX's own; a program that is there would read other bytes
        assert name in BY_JAX and (dtype != ">f4" or name == "value_and_grad")
        return
    assert isinstance(raised.value, ParamsError if is_param else DataError)
    got = {">f4": "dtype >f4, expected one that JAX has. Cast it", "g": f"dtype {np.dtype('g')}"}
    assert f"at {path}: got {got.get(dtype, 'dtype timedelta64[s]')}" in str(raised.value)


# --- how they print -----------------------------------------------------------------------------


def test_data_print_in_a_line():
    data = batches(ARRAYS, 4)
    next(iter(data))
    assert repr(prefetch(data, size=3)) == "Prefetched(Batches(23 rows, 4 a batch, at epoch 0, position 1), size 3)"


# --- prefetch ---------------------------------------------------------------------------------


def test_prefetch_changes_nothing_but_the_time():
    plain = batches(ARRAYS, 4, shuffle=True)
    data = prefetch(prefetch(batches(ARRAYS, 4, shuffle=True)), jax.devices()[1])
    assert len(data) == len(plain)
    for _ in range(2):
        for a, b in zip(data, plain, strict=True):
            assert_trees_equal(a, b)
            assert a["x"].devices() == {jax.devices()[1]} and data.get_state() == plain.get_state()
    assert not threads()

    resumed = prefetch(batches(ARRAYS, 4, shuffle=True), size=5)
    resumed.set_state({"epoch": 1, "position": 3})
    assert resumed.get_state() == {"epoch": 1, "position": 3}
    plain.set_state({"epoch": 1, "position": 3})
    assert_same(epochs_of(resumed, 2), epochs_of(plain, 2))


def test_prefetch_reads_size_batches_ahead_and_a_new_loop_ends_the_old_one():
    read = []
    data = prefetch(_Records([np.full(2, i) for i in range(9)]), size=3)
    it = iter(data)
    assert not threads()  # nothing is read before it is asked for
    next(it)
    assert len(threads()) == 1 and data.get_state()["position"] == 1
    other = iter(data)
    assert next(other)[0] == 0 and data.get_state() == {"epoch": 1, "position": 1, "data": None}
    assert next(it, None) is None and len(threads()) == 1
    data.close()
    assert not threads() and next(other, None) is None

    gate, begun = threading.Event(), []

    def gated():
        for i in range(9):
            begun.append(i)
            yield np.ones(1)
            gate.wait()

    it = iter(prefetch(gated(), size=3))
    next(it)
    threading.Timer(0.2, gate.set).start()
    it.close()  # what it works on is its last
    assert len(begun) <= 2 and not threads()

    def counting():
        for i in range(9):
            read.append(i)
            yield np.ones(1)

    it = iter(prefetch(counting(), size=3))
    next(it), time.sleep(0.1)
    assert len(read) == 4
    it.close()


@pytest.mark.medium
@pytest.mark.parametrize("how", ["error in the loop", "break", "collected in a cycle", "left"])
def test_the_thread_ends_with_the_loop(how):
    def loop():
        data = prefetch(itertools.repeat(np.ones(2)))
        it = iter(data)
        next(it)
        assert threads()
        if how == "collected in a cycle":
            cycle = [it]
            cycle.append(cycle)
        if how == "left":
            return
        del it
        for _ in data:
            if how == "error in the loop":
                raise ZeroDivisionError
            break

    if how == "error in the loop":
        with pytest.raises(ZeroDivisionError) as raised:
            loop()
        assert not threads() and raised.value is not None
    else:
        loop()
        gc.collect()
        assert not threads()


WAITING = {
    "a thread": "itertools.repeat(np.ones(2)), jax.devices()[0]",
    "the data": "itertools.chain([np.ones(2)], iter(threading.Event().wait, None))",
}


@pytest.mark.medium
@pytest.mark.parametrize("arguments", WAITING.values(), ids=WAITING)
def test_the_interpreter_exits_while_something_waits(arguments):
    code = "import itertools, threading, numpy as np, jax\nfrom tsunax import prefetch\n"
    code += f"it = iter(prefetch({arguments}))\nnext(it); print('done')"
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_prefetch_carries_the_exception_over():
    def broken():
        yield np.ones(2)
        raise KeyError("kernel")

    data = prefetch(broken())
    it = iter(data)
    next(it)
    with pytest.raises(
        DataError, match=r"data at batch 1 of epoch 0: got KeyError 'kernel', expected a batch"
    ) as raised:
        next(it)
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError) and [f.name for f in raised.traceback][-1] == "_pull"
    frames = []
    traceback = cause.__traceback__
    while traceback:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert frames[-1] == "broken"
    assert next(it, None) is None and not threads() and data.get_state()["position"] == 1


def test_prefetch_spreads_rows_over_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2), "t": np.float32(3)}
    for device in (mesh, NamedSharding(mesh, PartitionSpec("data"))):
        (got,) = prefetch([batch], device)
        assert_trees_equal(got, batch)
        assert got["x"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), 2)
        assert got["t"].sharding.is_fully_replicated and len(got["t"].devices()) == 4
    with pytest.raises(ValueError, match=r"partitioned \d times"):
        list(prefetch([{"x": np.ones((3, 2))}], mesh))
    assert not threads()


def test_the_next_batch_is_made_while_this_one_is_worked_on():
    begun = [threading.Event() for _ in range(6)]

    def host():
        for event in begun:
            event.set()
            yield np.ones(2)

    for i, _ in enumerate(prefetch(host(), size=1)):
        assert i == 5 or begun[i + 1].wait(10)


# --- any iterable -----------------------------------------------------------------------------


class _Loader:
    """A foreign loader, whose state is where and called what `kind` says."""

    def __init__(self, kind):
        self.kind, self.at = kind, 0
        self.getter, self.setter = {"g": ("get_state", "set_state"), "d": ("state_dict", "load_state_dict")}[kind[0]]
        if kind[1:] == "data":
            self._methods(self)

    def _methods(self, holder):
        setattr(holder, self.getter, lambda: {"at": self.at})
        setattr(holder, self.setter, lambda state: setattr(self, "at", state["at"]))

    def __iter__(self):
        loader = self

        class Iter:
            def __iter__(self):
                return self

            def __next__(self):
                if loader.at == 5:
                    loader.at = 0
                    raise StopIteration
                loader.at += 1
                return np.full(2, loader.at)

        it = Iter()
        if self.kind[1:] == "iterator":
            self.at = 0
            self._methods(it)
        return it


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["gdata", "ddata", "giterator", "diterator", "replay"])
def test_foreign_state(kind, ahead):
    make = (lambda: _Records([np.full(2, i) for i in range(1, 6)])) if kind == "replay" else lambda: _Loader(kind)
    make_source = lambda: as_source(prefetch(make()) if ahead else make())
    source, seen, states = make_source(), [], [make_source().state()]
    while len(seen) < 12:
        if (batch := source.next()) is not None:
            seen.append(int(batch[0]))
            states.append(source.state())
    assert seen == [1, 2, 3, 4, 5] * 2 + [1, 2]
    assert source.resumable == (kind != "replay")
    assert [(s["epoch"], s["position"]) for s in states[:6]] == [(0, i) for i in range(6)]
    chunked = make_source()
    assert [len(chunked.take(4)) for _ in range(2)] == [4, 1] and chunked.state() == states[5]
    for i in (0, 1, 4, 5, 7, 10):
        source = make_source()
        source.restore(states[i], fast_forward=kind == "replay")
        got = [int(b[0]) for _ in range(3) for b in source]
        assert got[:6] == ([1, 2, 3, 4, 5] * 5)[i : i + 6], i
        # a place also goes between data with and without prefetch
        other = as_source(make() if ahead else prefetch(make()))
        other.restore(states[i], fast_forward=kind == "replay")
        assert [int(b[0]) for _ in range(3) for b in other][:4] == ([1, 2, 3, 4, 5] * 5)[i : i + 4]


def test_a_run_goes_on_where_it_stopped_however_far_its_loader_was_read_ahead(tmp_path):
    """Its thread may have read to the end of the epoch: then there is no iterator with a state."""
    step = ts.train_step(lambda params, x: jnp.mean(x) + 0 * params)
    fit = functools.partial(ts.fit, step, log_every=1, progress=False)
    state, data = ts.setup(ts.rules.sgd(0.1), jnp.zeros(())), prefetch(_Loader("giterator"), size=9)

    def wait(run):
        for _ in range(500):
            time.sleep(0.01 * (data._source.epoch == 0))

    state, first = fit(state, data, steps=4, callbacks=ts.callbacks.every(4, wait))
    state, second = fit(state, data, steps=10)
    state, third = fit(state, data, steps=12)
    losses = [history["loss"].tolist() for history in (first, second, third)]
    assert losses == [[1, 2, 3, 4], [5, 1, 2, 3, 4, 5], [1, 2]]
    assert second["epoch"].tolist() + third["epoch"].tolist() == [0, 1, 1, 1, 1, 1, 2, 2]
    for steps in (5, 7):  # the checkpoint of an end of an epoch, too: a warning would be an error
        state = ts.setup(ts.rules.sgd(0.1), jnp.zeros(()))
        _, history = fit(state, prefetch(_Loader("giterator")), steps=steps, checkpoint=tmp_path)
    assert history["loss"].tolist() == [1, 2, 3, 4, 5, 1, 2]


def test_take_of_any_iterable():
    shapes = [2, 2, 2, 3, 3, 2]
    make = lambda: as_source([{"x": np.full((n, 1), i)} for i, n in enumerate(shapes)])
    source, chunks, states = make(), [], []
    for _ in range(6):
        chunk = source.take(2)
        chunks.append(None if chunk is None else chunk["x"][:, 0, 0].tolist())
        states.append(source.state())
    assert chunks == [[0, 1], [2], [3, 4], [5], None, [0, 1]]
    assert [(s["epoch"], s["position"]) for s in states] == [(0, 2), (0, 3), (0, 5), (0, 6), (1, 0), (1, 2)]
    source = make()
    source.restore(states[1])
    assert source.next()["x"][0, 0] == 3
    ours = as_source(batches(ARRAYS, 5))
    assert [len(c["x"]) for c in iter(lambda: ours.take(3), None)] == [3, 1, 1] and ours.state() == {
        "epoch": 1,
        "position": 0,
    }


def test_a_list_of_arrays_is_one_of_batches():
    """If they are alike, or differ in their rows; of many, sizes may differ, as those of texts."""
    x = np.ones((4, 3), np.float32)
    for data in ([x], [x, x], [x, x[:2]], [x, x[:2, :1]], [x[:, :n] for n in (1, 2, 3, 2)]):
        assert len(list(as_source(data))) == len(data)


def test_an_error_comes_after_the_batches_before_it():
    def broken():
        yield np.zeros(2)
        yield np.ones(2)
        raise OSError("disk")

    source = as_source(broken())
    assert source.take(8).tolist() == [[0, 0], [1, 1]] and source.state()["position"] == 2
    with pytest.raises(DataError, match="batch 2 of epoch 0: got OSError disk"):
        source.take(8)


class _BadRows:
    """12 rows, of which number 9 cannot be read."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 9:
            raise self.error("bad")
        return np.zeros(2, np.float32)


class _BadLoader(_BadRows):
    """A loader of another library: its iterator reads from a data set of the user's."""

    def __iter__(self):
        return _BadLoaderIterator(self)


class _BadLoaderIterator:
    def __init__(self, rows):
        self.rows, self.i = rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == 12:
            raise StopIteration
        self.i += 2
        return np.stack([self.rows[i] for i in range(self.i - 2, self.i)])


class _BadSequence(_BadRows, Sequence):
    """Batches by their number, iterated as `Sequence` does it."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i > 5:
            raise IndexError
        return np.stack([super(_BadSequence, self).__getitem__(j) for j in (2 * i, 2 * i + 1)])


class _BadFile(_BadRows):
    shape, dtype = (12, 2), np.dtype(np.float32)

    def __getitem__(self, rows):
        if 9 in np.arange(12)[rows]:
            raise self.error("bad")
        return np.zeros((len(np.arange(12)[rows]), 2), np.float32)


READERS = {
    "records": lambda error: batches(_BadRows(error), 2),
    "shuffled": lambda error: batches({"x": _BadRows(error)}, 2, shuffle=True),
    "a file": lambda error: batches(_BadFile(error), 2),
    "interleaved": lambda error: interleave([batches(_BadRows(error), 2), batches(np.zeros((4, 2)), 2)]),
    "a loader": _BadLoader,
    "a sequence": _BadSequence,
}
ERRORS = [StopIteration, StopAsyncIteration, IndexError, EOFError, KeyError, GeneratorExit]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", READERS)
def test_no_error_of_reading_is_taken_for_the_end(kind, error):
    """Whatever its type: an epoch is whole, or it raises."""
    for ahead in (False, True):
        for k in (None, 1, 8):
            data = READERS[kind](error)
            source = as_source(prefetch(data) if ahead else data)
            read = source.next if k is None else functools.partial(source.take, k)
            with pytest.raises((DataError, GeneratorExit)) as raised:
                for _ in range(9):
                    assert read() is not None
            assert "bad" in str(raised.value) or "bad" in str(raised.value.__cause__.__cause__)
    if kind not in ("a loader", "a sequence"):  # whose own iterators a loop by hand calls
        with pytest.raises((DataError, RuntimeError, error), match="bad"):
            list(READERS[kind](error))


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch])
@pytest.mark.parametrize("position", [0, 1])
def test_replay_reads_earlier_epochs_too(position, wrap):
    class Counting:
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            return iter([np.full(1, 10 * self.epoch + i) for i in range(3)])

    source = as_source(wrap(Counting()))
    source.restore({"epoch": 2, "position": position, "data": None}, fast_forward=True)
    assert [int(batch[0]) for batch in source] == [20, 21, 22][position:]


@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_list_has_its_position_by_the_number_of_the_batch(make, ahead):
    records = make({"x": np.full(2, i)} for i in range(3))
    as_given = lambda: as_source(prefetch(records) if ahead else records)
    source = as_given()
    assert source.resumable and source.next()["x"][0] == 0
    for epoch, position, following in [(0, 1, [1, 2]), (2, 0, [0, 1, 2]), (9, 2, [2]), (1, 3, [])]:
        source = as_given()
        source.restore({"epoch": epoch, "position": position, "data": None})
        assert [int(batch["x"][0]) for batch in source] == following and source.state()["epoch"] == epoch + 1
    with pytest.raises(DataError, match="fewer batches than before, expected epoch 0, position 4"):
        as_given().restore({"epoch": 0, "position": 4, "data": None})


@pytest.mark.parametrize("kind", ["gdata", "diterator", "replay"])
def test_a_batch_that_was_read_for_its_position_comes_next(kind):
    loader = _Records([np.full(2, i) for i in range(1, 6)]) if kind == "replay" else _Loader(kind)
    source, place = as_source(loader), {"epoch": 0, "position": 0}
    after = source.peek()
    assert after == source.peek() and after["data"] == (None if kind == "replay" else {"at": 1})
    assert {name: x for name, x in source.state().items() if name != "data"} == place
    assert source.resumable == (kind != "replay") and source.take(8)[:, 0].tolist() == [1, 2, 3, 4, 5]


class _Live:
    """A loader that returns its own dict for a state, and whose batches have two lengths."""

    def __init__(self):
        self.place = {"at": 0}

    def __iter__(self):
        while self.place["at"] < 4:
            self.place["at"] += 1
            yield np.zeros(2 + self.place["at"] // 3)

    def state_dict(self):
        return self.place

    def load_state_dict(self, place):
        self.place = dict(place)


def test_a_position_does_not_move_with_the_loader():
    source = as_source(_Live())
    assert len(source.take(4)) == 2 and source.state()["data"] == {"at": 2}


def test_tensors_of_other_libraries_become_arrays():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    batch = as_source([[Tensor(), jnp.ones(3), 2.0]]).next()
    assert type(batch[0]) is np.ndarray and isinstance(batch[1], jax.Array) and batch[2] == 2.0


def refilled(n=8, make=lambda buffer: {"x": buffer, "y": (buffer[:, :1],)}):
    """A loader that fills one buffer again for every batch."""
    buffer = np.empty((2, 3), np.float32)
    for i in range(n):
        buffer[:] = i
        yield make(buffer)


class _Shared:
    """As a tensor of torch: an array that shares its memory."""

    def __init__(self, x):
        self._x = x

    def __array__(self, dtype=None, copy=None):
        return self._x


@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"x": x, "y": (x[:, :1],)}, lambda x: [_Shared(x)]])
def test_a_loader_may_refill_its_buffer(make):
    first = lambda batch: np.asarray(jax.tree.leaves(batch)[-1]).ravel()[0]
    load = lambda: refilled(8, make)
    source = as_source(load())
    assert [first(b) for b in [source.next() for _ in range(8)]] == list(range(8))
    source = as_source(load())
    chunks = [jax.tree.leaves(source.take(k))[-1] for k in (1, 3, 16)]
    assert [c[:, 0, 0].tolist() for c in chunks] == [[0], [1, 2, 3], [4, 5, 6, 7]]
    for device in (None, jax.devices()[0], jax.make_mesh((2,), ("data",))):
        assert [first(b) for b in list(prefetch(load(), device, size=4))] == list(range(8))


def generator(n):
    return (np.ones(2) for _ in range(n))


def drain(data, epochs=2):
    source = as_source(data)
    return [batch for _ in range(epochs) for batch in source]


def raising():
    raise OSError("disk")
    yield


MESSAGES = {
    "empty": (lambda: drain([]), "data at epoch 0: got no batch at all, 0 in earlier epochs, expected at least one."),
    "empty generator": (
        lambda: drain(generator(0)),
        "data at epoch 0: got no batch at all, 0 in earlier epochs, expected at least one.",
    ),
    "used up": (
        lambda: drain(generator(3)),
        "data at epoch 1: got no batch at all, 3 in earlier epochs, expected at least one. "
        "A generator can be read once: give a list, ts.batches(...) or a grain dataset",
    ),
    "no state": (
        lambda: as_source(generator(1)).restore({"epoch": 0, "position": 1, "data": None}),
        "data at restore: got a generator without a state, at epoch 0, position 1, expected get_state/set_state or "
        "state_dict/load_state_dict. Use ts.batches or grain; or fast_forward=True, to read earlier batches again.",
    ),
    "no setter": (
        lambda: as_source([np.ones(2)]).restore({"epoch": 0, "position": 1, "data": 3}),
        "data at restore: got a list without a state, at epoch 0, position 1, expected get_state/set_state",
    ),
    "another state": (
        lambda: as_source([np.ones(2)]).restore({"epoch": 0, "position": 1}),
        "state at restore: got {'epoch': 0, 'position': 1}, expected data, epoch, position.",
    ),
    "fewer": (
        lambda: as_source([np.ones(2)]).restore({"epoch": 0, "position": 2, "data": None}),
        "data at restore: got fewer batches than before, expected epoch 0, position 2.",
    ),
    "raises": (lambda: drain(raising()), "data at batch 0 of epoch 0: got OSError disk, expected a batch"),
    "gives None": (lambda: drain([np.ones(2), None]), "batch at batch 1 of epoch 0: got None, expected a tree"),
    "arrays": (
        lambda: as_source({"x": np.ones(2)}),
        "data: got dict with x, expected an iterable of batches. Of arrays or records: ts.batches(arrays, batch_size). One",
    ),
    "pair": (lambda: as_source((np.ones(2), np.ones(2))), "data: got tuple of 2, expected an iterable of batches. Of"),
    "a list of inputs and targets": (
        lambda: as_source([np.ones((4, 2)), np.ones(4)]),
        "data: got list of 2, expected an iterable of batches. Of arrays or records: ts.batches(arrays, batch_size). One",
    ),
    "a list of inputs, targets and weights": (
        lambda: prefetch([jnp.ones((4, 2)), np.ones((4, 1), np.int32), np.ones(4)]),
        "data: got list of 3, expected an iterable of batches. Of",
    ),
    "data set": (
        lambda: as_source(_Dataset("dict")),
        "data: got _Dataset, expected an iterable of batches. Of arrays or records: ts.batches(arrays, batch_size).",
    ),
    "ahead of a data set": (lambda: prefetch(_Dataset("dict")), "data: got _Dataset, expected an iterable of batches"),
    "number": (lambda: as_source(3), "data: got 3 (int), expected an iterable of batches"),
    "batch None": (lambda: check_batch(None, "step 3"), "batch at step 3: got None, expected at least 1 row"),
    "batch {}": (lambda: check_batch({}), "batch: got an empty dict, expected at least 1 row"),
    "batch of 0": (
        lambda: check_batch({"x": np.ones((0, 2))}, "step 3"),
        "batch at step 3: got 0 rows in batch['x'], expected at",
    ),
    "differing": (
        lambda: check_batch({"x": np.ones((3, 2)), "y": np.ones(4)}),
        "batch: got 3 rows in batch['x'], 4 rows in batch['y'], expected at least 1 row, the same number in every leaf. "
        "ts.data.pack_graphs makes rows of graphs.",
    ),
    "string": (lambda: check_batch({"x": "a"}), "leaf at batch['x']: got 'a' (str), expected an array with rows"),
    "scalar": (
        lambda: check_batch({"x": np.ones(2), "t": np.float32(1)}),
        "leaf at batch['t']: got 1.0 (float32), expected an array with rows. Leave it out of the batch: step(state, ",
    ),
    "number leaf": (
        lambda: check_batch({"t": 2.0}),
        "leaf at batch['t']: got 2.0 (float), expected an array with rows",
    ),
    "no arrays": (lambda: batches({}, 2), "arrays: got an empty dict, expected at least 1 row"),
    "unequal arrays": (
        lambda: batches([np.ones(2), np.ones(3)], 2),
        "arrays: got 2 rows in arrays[0], 3 rows in arrays",
    ),
    "lists": (lambda: batches({"x": [1, 2]}, 2), "leaf at arrays['x'][0]: got 1 (int), expected an array"),
    "size 0": (lambda: batches(np.ones(3), 0), "batch_size at batches(): got 0 (int), expected an int of 1 or"),
    "seed -1": (lambda: batches(np.ones(3), 1, seed=-1), "seed at batches(): got -1, expected an int ≥ 0"),
    "size 2.0": (lambda: batches(np.ones(3), 2.0), "batch_size at batches(): got 2.0 (float), expected an int of"),
    "shuffle": (
        lambda: batches(np.ones(3), 2, shuffle="yes"),
        "shuffle at batches(): got 'yes' (str), expected True or",
    ),
    "drop_remainder": (
        lambda: batches(np.ones(3), 2, drop_remainder="no"),
        "drop_remainder at batches(): got 'no' (str), expected True or False",
    ),
    "none left": (
        lambda: batches(np.ones(3), 4, drop_remainder=True),
        "arrays at batches(): got 3 rows, fewer than batch_siz",
    ),
    "process": (
        lambda: batches(np.ones(9), 3, process=(3, 3)),
        "process at batches(): got (3, 3), expected an index be",
    ),
    "process size": (
        lambda: batches(np.ones(9), 4, process=(0, 3)),
        "batch_size at batches(): got 4, expected a multiple of 3 processes. It counts the rows of all processes",
    ),
    "records device": (
        lambda: batches(_Dataset(), 2, device=True),
        "device at batches(): got records, expected arrays. Batches of records: ts.prefetch(data, device).",
    ),
    "state": (
        lambda: batches(np.ones(9), 4).set_state({"epoch": 0, "position": 9}),
        "state at set_state(): got {'epoch': 0, 'position': 9}, expected {\"epoch\": int, \"position\": int}, position",
    ),
    "state of another": (lambda: batches(np.ones(9), 4).set_state({"at": 1}), "state at set_state(): got {'at': 1}, e"),
    "settings of another": (
        lambda: batches(np.ones(9), 4).set_state(
            {"epoch": 0, "position": 1, "settings": batches(np.ones(9), 2, seed=1).settings}
        ),
        "data at resume: got batch_size 4, seed 0, expected batch_size 2, seed 1, as in the checkpoint",
    ),
    "device": (lambda: prefetch([], 3), "device at prefetch(): got 3 (int), expected a kind or a jax.Device, or (kind"),
    "prefetch size": (lambda: prefetch([], size=0), "size at prefetch(): got 0, expected 1 or more"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    make, text = MESSAGES[name]
    with pytest.raises((DataError, WrongTypeError, HyperparameterError)) as raised:
        make()
    assert str(raised.value).startswith(text)


# --- other libraries --------------------------------------------------------------------------


def test_grain_as_documented():
    need("grain")
    page = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "import grain" in block]
    found: dict = {}
    exec(block, found)
    assert found["place"] == {"epoch": 0, "position": 3, "data": {"next_index": 3}}
    assert_trees_close(found["resumed"], found["following"], rtol=0, atol=0)
    rows = np.concatenate([batch["x"][:, 0] for batch in found["seen"]])
    assert len(set(rows.tolist())) == 3 * 64 and found["seen"][0]["x"].devices() == {jax.devices()[0]}
    epochs = [np.sort(np.concatenate([b["x"][:, 0] for b in found["again"]])) for _ in range(2)]
    assert [len(e) for e in epochs] == [(15 - 4) * 64, 15 * 64]  # the rest of this epoch, and another one


@pytest.mark.medium
def test_torch():
    torch = need("torch")
    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    got = [*as_source(prefetch(loader, jax.devices()[0]))]
    assert [batch[1].tolist() for batch in got] == [[0, 1], [2, 3], [4]] and got[0][0].shape == (2, 2)
    assert_same(batches({"x": x}, 2), [{"x": np.asarray(x[i : i + 2])} for i in (0, 2, 4)])


def test_a_file_in_memory_stays_on_the_disk_beside_an_array_on_a_device(tmp_path):
    """A memory map may be larger than the device, and than the machine's memory."""
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(20, 3))
    placed = jax.device_put(np.arange(20), jax.devices()[1])
    data = ts.batches((rows, placed), 10)
    assert data.resident is None and next(iter(data))[0].shape == (10, 3)


class LoaderWithFields:
    _fields = ("x",)  # as of a dataset that names its columns

    def __iter__(self):
        return iter([np.ones((2, 3), np.float32)] * 3)


def test_loaders_that_look_like_one_batch():
    assert next(as_source(LoaderWithFields()).data.__iter__()).shape == (2, 3)
    buckets = [np.zeros((8, 128), np.int32), np.zeros((8, 64), np.int32)]  # batches of two lengths
    assert as_source(buckets).take(8).shape == (1, 8, 128)
    with pytest.raises(WrongTypeError, match="expected an iterable of batches"):
        as_source([np.zeros((8, 3), np.float32), np.zeros(8, np.int32)])
