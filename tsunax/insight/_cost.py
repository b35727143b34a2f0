"""FLOPs from a program's jaxpr; communication and donation from its HLO.

XLA's own count takes the body of a loop once, however often it runs. Here a `scan` counts as often
as it runs, and dead equations, which XLA drops, not at all.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core.trees import programs_in


def flops_of(program: Any) -> float:
    """Floating-point operations of dot products and convolutions in a (closed) jaxpr.

    On all devices together, a multiply-add as two; zeros of padding and dilation are left out, as
    by XLA. The body of a `while` loop counts once: the number of its trips is not known. cuDNN's
    attention counts as the products that it does in place of, masked or not, and a Pallas kernel
    once for each place of its grid. What other kernels do (custom calls) is not known.

    >>> import jax, jax.numpy as jnp
    >>> layers = lambda x, w: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]
    >>> flops_of(jax.make_jaxpr(layers)(jnp.ones((4, 8)), jnp.ones((8, 8)))) == 3 * 2 * 4 * 8 * 8
    True
    """
    return _counted(getattr(program, "jaxpr", program), None)


def _counted(jaxpr: Any, live: list[bool] | None) -> float:
    """The equations that the live outputs need, backwards; None: all outputs are live."""
    outvars = zip(jaxpr.outvars, live or [True] * len(jaxpr.outvars), strict=True)
    wanted = {v for v, on in outvars if on and _is_var(v)}
    found = 0.0
    for eqn in reversed(jaxpr.eqns):
        out = [v in wanted for v in eqn.outvars]
        if any(out) or eqn.effects:
            found += _equation(eqn, out)
            wanted.update(filter(_is_var, eqn.invars))
    return found


def _is_var(v: Any) -> bool:
    return not hasattr(v, "val")


def _equation(eqn: Any, live: list[bool]) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        return _of_product(eqn, eqn.params["dimension_numbers"])
    if name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = ragged.dot_dimension_numbers
        total = _of_product(eqn, ragged.dot_dimension_numbers)
        # each row is in one group: a sum over rows has a result for each group
        is_sum = ragged.lhs_ragged_dimensions[0] in contracted
        return total / eqn.invars[2].aval.shape[-1] if is_sum else total
    if name == "conv_general_dilated":
        return _of_convolution(eqn)
    if attention := re.match("dot_product_attention_(?:fp8_)?(fwd|bwd)", name):
        q, k, v = (x.aval.shape for x in eqn.invars[:3])
        rows = k[1 + eqn.params["layout"]]  # 0: batch, row, head, feature; 1: heads before rows
        forward = 2.0 * math.prod(q[:3]) * rows * (q[3] + v[3])
        return forward if attention[1] == "fwd" else 2 * forward
    programs = programs_in(eqn)
    if name == "scan":
        return _counted(programs[0], None) * eqn.params["length"]
    if name == "cond":
        return max(_counted(branch, live) for branch in programs)
    fits = lambda program: name != "while" and len(program.outvars) == len(live)
    total = sum(_counted(program, live if fits(program) else None) for program in programs)
    times = ()
    if name == "shard_map":  # written for one device
        times = eqn.params["mesh"].shape.values()
    elif name == "pallas_call":
        times = (n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return total * math.prod(times)


def _of_product(eqn: Any, dimension_numbers: Any) -> float:
    (contracted, _), _ = dimension_numbers
    x, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2.0 * _factor(out) * math.prod((*out.shape, *(x.shape[i] for i in contracted)))


def _of_convolution(eqn: Any) -> float:
    p = eqn.params
    x, w, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    lhs, rhs, to = p["dimension_numbers"]
    # (output place, tap) pairs that meet an element of the input, axis by axis
    pairs = 1.0
    for i in range(len(p["window_strides"])):
        n, k, m = x[lhs[2 + i]], w[rhs[2 + i]], out[to[2 + i]]
        start = np.arange(m)[:, None] * p["window_strides"][i] - p["padding"][i][0]
        place = start + np.arange(k) * p["rhs_dilation"][i]
        spacing = p["lhs_dilation"][i]
        is_inside = (place >= 0) & (place <= (n - 1) * spacing)
        pairs *= np.count_nonzero(is_inside & (place % spacing == 0))
    return 2.0 * _factor(eqn.outvars[0].aval) * pairs * out[to[0]] * out[to[1]] * w[rhs[1]]


def _factor(aval: Any) -> int:
    return 4 if aval.dtype.kind == "c" else 1


@dataclass(frozen=True)
class Collective:
    """Communication of one kind in a compiled program, for one run of it on one device."""

    kind: str
    count: float  # those in loops as often as they run, as far as XLA knows that
    bytes: float  # of what they give


_KINDS = (
    "all-(?:reduce|gather)|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)"
)
_CALL = re.compile(rf" = (.+?) ({_KINDS})(-start)?\(")
_CHAIN = re.compile(r'channel_id=(\d+).* frontend_attributes=\{[^}]*chain_id="(\d+)"')
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(body|condition|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry computation of an HLO text, and the lines of each."""
    entry, lines, found = "", [], {}
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            lines = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return entry, found


def collectives_in(text: str) -> tuple[Collective, ...]:
    """What a compiled program sends to other devices, from its text."""
    entry, computations = _computations(text)
    counts, sizes = defaultdict[str, float](float), defaultdict[str, float](float)
    # A TPU shows a collective that overlaps with products in several fusions of one chain. Its
    # channel alone does not tell: all that `shard_map` writes have channel 1.
    chains = set[tuple[str, ...]]()

    def walk(name: str, times: float) -> None:
        for line in computations.get(name, ()):
            if (call := _CALL.search(line)) is not None:
                if (chain := _CHAIN.search(line)) is not None:
                    if (call[2], *chain.groups()) in chains:
                        continue
                    chains.add((call[2], *chain.groups()))
                parts = [_bytes(*shape) for shape in _SHAPE.findall(call[1])]
                counts[call[2]] += times
                # what starts one and does not wait has operands and results in one tuple
                sizes[call[2]] += times * (max(parts) if call[3] else sum(parts))
            trips = int(known[1]) if (known := _TRIPS.search(line)) else 1
            for role, called in _CALLED.findall(line):
                if called.startswith("all-reduce-scatter"):  # a TPU's name for a reduce-scatter
                    counts["reduce-scatter"] += times
                    given = _SHAPE.findall(line.partition(" fusion(")[0])
                    sizes["reduce-scatter"] += times * sum(_bytes(*shape) for shape in given)
                    continue
                walk(called, times * (trips if role == "body" else 1))
            for branches in _BRANCHES.findall(line):
                for called in branches.split(","):
                    walk(called.strip().lstrip("%"), times)

    walk(entry, 1)
    return tuple(Collective(kind, counts[kind], sizes[kind]) for kind in sorted(counts))


def _bytes(dtype: str, shape: str) -> float:
    bits = re.search(r"\d+", dtype)
    size = 1.0 if dtype == "pred" or bits is None else int(bits[0]) / 8
    return size * math.prod(int(n) for n in shape.split(",") if n)


def donated_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a compiled program's arguments, and of those whose memory results reuse."""
    entry, computations = _computations(text)
    pattern = r'parameter\((\d+)\).*?op_name="((?:[^"\\]|\\.)*)"'
    found = filter(None, (re.search(pattern, line) for line in computations[entry]))
    names = {int(x[1]): x[2].replace("\\'", "'").replace('\\"', '"') for x in found}
    head = text.partition("\n")[0]
    table = head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    aliased = {int(n) for n in re.findall(r"\}: \((\d+),", table)}
    return frozenset(names.values()), frozenset(names[n] for n in aliased if n in names)
