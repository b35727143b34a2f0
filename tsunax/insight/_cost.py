"""FLOPs from a program's jaxpr; communication and donation from its HLO.

XLA's own count takes the body of a loop once, however often it runs. Here the body of a `scan`
counts once per trip, and dead equations, which XLA drops, do not count.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core.dataflow import programs_in


def flops_of(program: Any, is_output_live: list[bool] | None = None) -> float:
    """Floating-point operations of dot products and convolutions in a (closed) jaxpr.

    On all devices together; a multiply-add counts as two. Zeros of padding and dilation are left
    out, as XLA does. The body of a `while` loop counts once: the number of its trips is not known.
    cuDNN's attention counts as the products that it replaces, masked or not, and a Pallas kernel
    once for each place of its grid. Other kernels (custom calls) count as nothing. Operations count
    only if an output that is marked in `is_output_live` needs them.

    >>> import jax, jax.numpy as jnp
    >>> layers = lambda x, w: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]
    >>> flops_of(jax.make_jaxpr(layers)(jnp.ones((4, 8)), jnp.ones((8, 8)))) == 3 * 2 * 4 * 8 * 8
    True
    """
    # Walk back over the equations that the live outputs need.
    jaxpr = getattr(program, "jaxpr", program)
    outvars = zip(jaxpr.outvars, is_output_live or [True] * len(jaxpr.outvars), strict=True)
    live_variables = {v for v, is_live in outvars if is_live and _is_var(v)}
    flops = 0.0
    for eqn in reversed(jaxpr.eqns):
        live_outputs = [v in live_variables for v in eqn.outvars]
        if any(live_outputs) or eqn.effects:
            flops += _flops_of_equation(eqn, live_outputs)
            live_variables.update(filter(_is_var, eqn.invars))
    return flops


def _is_var(v: Any) -> bool:
    return not hasattr(v, "val")


def _flops_of_equation(eqn: Any, live: list[bool]) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        return _flops_of_product(eqn, eqn.params["dimension_numbers"])
    if name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = ragged.dot_dimension_numbers
        total = _flops_of_product(eqn, ragged.dot_dimension_numbers)
        # each row is in one group: a sum over rows has a result for each group
        is_sum = ragged.lhs_ragged_dimensions[0] in contracted
        return total / eqn.invars[2].aval.shape[-1] if is_sum else total
    if name == "conv_general_dilated":
        return _flops_of_convolution(eqn)
    if attention := re.match("dot_product_attention_(?:fp8_)?(fwd|bwd)", name):
        q, k, v = (x.aval.shape for x in eqn.invars[:3])
        key_rows = k[1 + eqn.params["layout"]]  # 0: batch, row, head, feature; 1: heads before rows
        forward = 2.0 * math.prod(q[:3]) * key_rows * (q[3] + v[3])
        return forward if attention[1] == "fwd" else 2 * forward
    programs = programs_in(eqn)
    if name == "scan":
        return flops_of(programs[0]) * eqn.params["length"]
    if name == "cond":
        return max(flops_of(branch, live) for branch in programs)
    has_same_outputs = lambda program: name != "while" and len(program.outvars) == len(live)
    total = sum(
        flops_of(program, live if has_same_outputs(program) else None) for program in programs
    )
    trip_counts = ()
    if name == "shard_map":  # its program is written for a single device
        trip_counts = eqn.params["mesh"].shape.values()
    elif name == "pallas_call":
        trip_counts = (n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return total * math.prod(trip_counts)


def _flops_of_product(eqn: Any, dimension_numbers: Any) -> float:
    (contracted, _), _ = dimension_numbers
    x, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2.0 * _flops_factor(out) * math.prod((*out.shape, *(x.shape[i] for i in contracted)))


def _flops_of_convolution(eqn: Any) -> float:
    p = eqn.params
    x, w, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    in_axes, kernel_axes, out_axes = p["dimension_numbers"]
    # Count the pairs (output position, kernel tap) that meet an input element, axis by axis.
    pairs = 1.0
    for i in range(len(p["window_strides"])):
        input_size = x[in_axes[2 + i]]
        kernel_size = w[kernel_axes[2 + i]]
        output_size = out[out_axes[2 + i]]
        start = np.arange(output_size)[:, None] * p["window_strides"][i] - p["padding"][i][0]
        position = start + np.arange(kernel_size) * p["rhs_dilation"][i]
        spacing = p["lhs_dilation"][i]
        is_inside = (position >= 0) & (position <= (input_size - 1) * spacing)
        pairs *= np.count_nonzero(is_inside & (position % spacing == 0))
    return (
        2.0
        * _flops_factor(eqn.outvars[0].aval)
        * pairs
        * out[out_axes[0]]
        * out[out_axes[1]]
        * w[kernel_axes[1]]
    )


def _flops_factor(aval: Any) -> int:
    return 4 if aval.dtype.kind == "c" else 1


@dataclass(frozen=True)
class Collective:
    """Communication of one kind in a compiled program: per run of the program and per device."""

    kind: str
    count: float  # a collective in a loop counts once per trip, if XLA computes the number of trips
    bytes: float  # the size of all results


_COLLECTIVE_KINDS = (
    "all-(?:reduce|gather)|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)"
)
_COLLECTIVE_CALL = re.compile(rf" = (.+?) ({_COLLECTIVE_KINDS})(-start)?\(")
_CHAIN = re.compile(r'channel_id=(\d+).* frontend_attributes=\{[^}]*chain_id="(\d+)"')
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED_COMPUTATION = re.compile(
    r"(body|condition|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COMPUTATION_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry computation of an HLO text, and the lines of each."""
    entry, lines, lines_of = "", [], {}
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (match := _COMPUTATION_HEAD.match(line)):
            lines = lines_of[match[2]] = []
            entry = match[2] if match[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return entry, lines_of


def collectives_in(text: str) -> tuple[Collective, ...]:
    """The communication between devices of a compiled program, from its text."""
    entry, computations = _computations(text)
    counts, sizes = defaultdict[str, float](float), defaultdict[str, float](float)
    # A TPU lists a collective that overlaps with products in several fusions, which share a chain.
    # The channel does not identify it: all collectives of `shard_map` have channel 1.
    chains = set[tuple[str, ...]]()

    def walk(name: str, runs: float) -> None:
        for line in computations.get(name, ()):
            if (call := _COLLECTIVE_CALL.search(line)) is not None:
                if (chain := _CHAIN.search(line)) is not None:
                    if (call[2], *chain.groups()) in chains:
                        continue
                    chains.add((call[2], *chain.groups()))
                byte_counts = [_bytes(*shape) for shape in _SHAPE.findall(call[1])]
                counts[call[2]] += runs
                # The start of an asynchronous collective returns operands and results in a tuple.
                sizes[call[2]] += runs * (max(byte_counts) if call[3] else sum(byte_counts))
            trips = int(trip_match[1]) if (trip_match := _TRIP_COUNT.search(line)) else 1
            for role, callee in _CALLED_COMPUTATION.findall(line):
                if callee.startswith("all-reduce-scatter"):  # a TPU's name for a reduce-scatter
                    counts["reduce-scatter"] += runs
                    result_shapes = _SHAPE.findall(line.partition(" fusion(")[0])
                    sizes["reduce-scatter"] += runs * sum(_bytes(*shape) for shape in result_shapes)
                    continue
                walk(callee, runs * (trips if role == "body" else 1))
            for branches in _BRANCHES.findall(line):
                for callee in branches.split(","):
                    walk(callee.strip().lstrip("%"), runs)

    walk(entry, 1)
    return tuple(Collective(kind, counts[kind], sizes[kind]) for kind in sorted(counts))


def _bytes(dtype: str, shape: str) -> float:
    bits = re.search(r"\d+", dtype)
    size = 1.0 if dtype == "pred" or bits is None else int(bits[0]) / 8
    return size * math.prod(int(n) for n in shape.split(",") if n)


def donated_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a compiled program's arguments, and of the arguments that results overwrite."""
    entry, computations = _computations(text)
    pattern = r'parameter\((\d+)\).*?op_name="((?:[^"\\]|\\.)*)"'
    parameters = filter(None, (re.search(pattern, line) for line in computations[entry]))
    names = {
        int(match[1]): match[2].replace("\\'", "'").replace('\\"', '"') for match in parameters
    }
    head = text.partition("\n")[0]
    table = head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    aliased = {int(n) for n in re.findall(r"\}: \((\d+),", table)}
    return frozenset(names.values()), frozenset(names[n] for n in aliased if n in names)
