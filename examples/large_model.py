"""A model that no device here can hold: shapes, a mesh, the needs of its step, then the first step.

    python examples/large_model.py                                   # a small one, on 8 simulated CPU devices
    python examples/large_model.py --size 70B --devices 64 --tensor 8 --shapes-only
    python examples/large_model.py --size 7B --topology v5e:8x8      # needs libtpu: the extra `tpu`
    python examples/large_model.py --size 70B --topology v5p:4x4x8 --tensor 4

Device: any. Two CPU cores take about 15 seconds, 7B some minutes of XLA's TPU compiler. It prints
`memory on each device: 56.3 MiB`, fails if the step does not fit, and ends in the loss of the first
step, `loss 6.24`: with `--shapes-only`, or for devices that are not here, nothing is run.

A decoder in the shape of Llama 2 with a scan over its layers: bfloat16 with float32 params, AdamW,
clipping, activations recomputed. The state is made by `jax.eval_shape`, so that no array exists.
"""

import argparse

import jax
import jax.numpy as jnp

import tsunax as ts

# layers, width, heads, width of the feed-forward part, vocabulary, tokens
SIZES = {
    "small": (4, 256, 4, 688, 512, 128),
    "7B": (32, 4096, 32, 11008, 32000, 2048),
    "70B": (80, 8192, 64, 28672, 32000, 2048),
}


def init(key, layers, width, wide, vocabulary):
    draw = lambda *shape: 0.02 * jax.random.normal(key, shape)
    square = {name: draw(layers, width, width) for name in ("query", "key", "value", "out")}
    feed = {
        "gate": draw(layers, width, wide),
        "up": draw(layers, width, wide),
        "down": draw(layers, wide, width),
    }
    norms = {name: jnp.ones((layers, width)) for name in ("norm1", "norm2")}
    blocks = square | feed | norms
    return {"embed": draw(vocabulary, width), "blocks": blocks, "head": draw(width, vocabulary)}


def normed(x, scale):
    square = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def block(x, p, heads):
    h = normed(x, p["norm1"])
    split = lambda w: (h @ w).reshape(*h.shape[:2], heads, -1)
    attended = jax.nn.dot_product_attention(
        *map(split, (p["query"], p["key"], p["value"])), is_causal=True
    )
    x = x + attended.reshape(x.shape) @ p["out"]
    h = normed(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss_of(heads):
    def loss_fn(params, tokens):
        layer = jax.checkpoint(lambda x, p: (block(x, p, heads), None))
        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["blocks"])
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(
            x @ params["head"], tokens[:, 1:]
        )
        return ts.Loss.mean(losses)

    return loss_fn


def main(size, topology, tensor, rows, memory, shapes_only):
    layers, width, heads, wide, vocabulary, tokens = SIZES[size]
    devices = ts.devices.topology(topology) if topology else None
    mesh = ts.mesh(data=1, fsdp=-1, tensor=tensor, devices=devices)
    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(3e-4, b2=0.95, weight_decay=0.1)
    )
    make = lambda: ts.setup(
        rule, init(jax.random.key(0), layers, width, wide, vocabulary), precision="bfloat16", key=0
    )
    by_columns, by_rows = (None, None, "tensor"), (None, "tensor", None)
    names = {by_columns: ("query", "key", "value", "gate", "up"), by_rows: ("out", "down")}
    rules = {f"blocks/{name}": axes for axes, found in names.items() for name in found}
    rules = rules if tensor > 1 else None
    state = ts.shard(jax.eval_shape(make), mesh, rules)
    params = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"{params / 1e9:.3g} billion params, {mesh.size} devices")

    rows = rows or mesh.shape["fsdp"]
    batch = jax.ShapeDtypeStruct((rows, tokens + 1), jnp.int32)
    step = ts.train_step(loss_of(heads))
    about = ts.describe(step, state, batch)
    print(about)
    print(f"memory on each device: {about.memory.total / 2**20:.1f} MiB")
    if memory and about.memory.total > memory * 2**30:
        raise SystemExit(f"expected at most {memory} GiB")
    if not (shapes_only or topology):
        state = ts.shard(make, mesh, rules)  # each device makes its own part: never whole anywhere
        tokens = jax.random.randint(jax.random.key(1), batch.shape, 0, vocabulary)
        state, info = step(state, tokens)
        print(f"loss {info.loss:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--topology", help="of TPUs, such as v5e:8x8; else 8 simulated CPU devices")
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share each product")
    parser.add_argument("--rows", type=int, help="of the batch, one for each part by default")
    parser.add_argument("--memory", type=float, help="GiB of a device: more is a failure")
    parser.add_argument("--shapes-only", action="store_true", help="do not run a step")
    given = vars(parser.parse_args())
    devices = given.pop("devices")
    if given["topology"] is None:
        ts.devices.simulate(devices)
    main(**given)
