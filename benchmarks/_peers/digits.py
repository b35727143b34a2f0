"""One training on the digits, by the way that the command line names, until 98 % of the test images are right.

    python digits.py WAY DATA CACHE START

Prints the seconds from START (of `time.time`) to the end of the first step, those to 98 %, and the epochs: as JSON.
Everyone trains the network 64-256-128-10 with Adam on shuffled batches of 32, and looks at the test images after each
epoch. JAX keeps its compiled programs in the folder CACHE.
"""

import itertools
import json
import os
import sys
import time

import numpy as np

WAY, DATA, CACHE, START = *sys.argv[1:4], float(sys.argv[4])
SIZES, ROWS, RATE, GOAL, MOST = (64, 256, 128, 10), 32, 2e-3, 0.98, 60
LAYERS = tuple(itertools.pairwise(SIZES))
os.environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
if WAY != "tsunax":  # it has a function for these
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
seen: dict = {}


def first() -> None:
    seen.setdefault("first", time.time() - START)


def reached(accuracy: float) -> bool:
    """Whether that is enough, after another epoch."""
    seen["epochs"] = seen.get("epochs", 0) + 1
    if accuracy >= GOAL:
        seen["goal"] = time.time() - START
    return "goal" in seen or seen["epochs"] == MOST


def arrays():
    """(images, labels) to train and to test."""
    with np.load(DATA) as file:
        x, y = file["x"], file["y"]
    return (x[360:], y[360:]), (x[:360], y[:360])


def weights() -> list:
    rng = np.random.default_rng(0)
    draw = lambda a, b: (rng.normal(size=(a, b)) * (2 / a) ** 0.5).astype(np.float32)
    return [(draw(a, b), np.zeros(b, np.float32)) for a, b in LAYERS]


def shuffled(x, y):
    """Epochs of batches."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(y))
        yield [(x[rows], y[rows]) for rows in np.split(order[: len(y) // ROWS * ROWS], len(y) // ROWS)]


def train(step, accuracy) -> None:
    """The loop by hand: `step(x, y)` waits for nobody but at the first call, if it answers with a function."""
    rows, (x, y) = arrays()
    for epoch in shuffled(*rows):
        for batch in epoch:
            wait = step(*batch)
            if "first" not in seen:
                wait()
                first()
        if reached(accuracy(x, y)):
            return


def logits_of(params, x):
    import jax

    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def by_tsunax() -> None:
    import optax
    import tsunax as ts

    ts.reproduce.compile_cache(CACHE)
    rows, held_out = arrays()

    def loss_fn(params, batch):
        logits = logits_of(params, batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == batch[1]})

    class First:
        at = (1,)

        def __call__(self, run):
            if run.step == 1:
                first()

    def stop(run):
        if reached(run.metrics["val/accuracy"]):
            run.stop("enough")

    stop.events = ("evaluate",)
    test, eval_step = ts.batches(held_out, 360), ts.eval_step(loss_fn)
    data = ts.batches(rows, ROWS, shuffle=True, seed=0, drop_remainder=True)
    state = ts.setup(ts.rules.adam(RATE), weights())
    evaluate = lambda state: ts.evaluate(eval_step, state, {"val": test})
    ts.fit(
        ts.train_step(loss_fn), state, data, epochs=MOST, evaluate=evaluate, callbacks=[First(), stop], progress=False
    )


def by_jax() -> None:
    import functools

    import jax
    import optax

    tx = optax.adam(RATE)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(held, x, y):
        params, opt_state = held
        loss_fn = lambda p: optax.softmax_cross_entropy_with_integer_labels(logits_of(p, x), y).mean()
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    right = jax.jit(lambda params, x, y: (logits_of(params, x).argmax(-1) == y).mean())
    params = jax.device_put(weights())
    held = [(params, jax.jit(tx.init)(params))]

    def step(x, y):
        held[0], loss = update(held[0], x, y)
        return loss.block_until_ready

    train(step, lambda x, y: float(right(held[0][0], x, y)))


def by_nnx() -> None:
    import optax
    from flax import nnx

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in LAYERS])

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, x, y):
        loss_fn = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    right = nnx.jit(lambda model, x, y: (model(x).argmax(-1) == y).mean())
    step = lambda x, y: update(model, optimizer, x, y).block_until_ready
    train(step, lambda x, y: float(right(model, x, y)))


def torch_mlp():
    import torch

    layers = [part for a, b in LAYERS for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1])


def by_torch() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the faster one for a model of this size
    model = torch_mlp()
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)

    def step(x, y):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y).long()).backward()
        optimizer.step()
        return lambda: None

    def right(x, y):
        with torch.no_grad():
            return float((model(torch.from_numpy(x)).argmax(-1).numpy() == y).mean())

    train(step, right)


def by_lightning() -> None:
    import warnings

    import lightning
    import torch

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch_mlp()

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def on_train_batch_end(self, *_):
            first()

        def validation_step(self, batch, _):
            if reached(float((self.layers(batch[0]).argmax(-1) == batch[1]).float().mean())):
                self.trainer.should_stop = True

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), RATE)

    sets = [torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in arrays()]
    loader = torch.utils.data.DataLoader(sets[0], ROWS, shuffle=True, drop_last=True)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(max_epochs=MOST, accelerator="cpu", num_sanity_val_steps=0, **dict.fromkeys(off, False))
    trainer.fit(Model(), loader, torch.utils.data.DataLoader(sets[1], 360))


def by_keras() -> None:
    import keras

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(size, "relu") for size in SIZES[1:-1]]
    model = keras.Sequential([keras.Input(SIZES[:1]), *dense, keras.layers.Dense(SIZES[-1])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss, metrics=["accuracy"])
    rows, held_out = arrays()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            first()

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = reached(logs["val_accuracy"])

    given = {"batch_size": ROWS, "epochs": MOST, "verbose": 0}
    model.fit(*rows, validation_data=held_out, validation_batch_size=360, callbacks=[Watch()], **given)


said = os.fdopen(os.dup(1), "w")  # whatever a library prints goes to stderr instead
os.dup2(2, 1)
globals()[f"by_{WAY}"]()
print(json.dumps([seen["first"], seen.get("goal"), seen["epochs"]]), file=said, flush=True)
