"""Kill runs of Keras and of Lightning that resume as their own pages show it, and compare with a run left alone.

    .peers/keras/bin/python campaigns/frameworks.py keras --seeds 0:10       # the environments of the benchmarks
    .peers/lightning/bin/python campaigns/frameworks.py lightning --seeds 0:10

As in `training_run.py`: 24 rows, shuffled, batches of 4, Adam, dropout, a save every second step. A run is a process,
killed up to twice and started again; it tells STEP at each batch and DIGEST, the hash of its parameters, at its end.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, SIZE, EPOCHS, EVERY = 24, 4, 6, 2
PAUSE = 0.1  # seconds of a step, so that a kill meets one
PATIENCE = 600.0


def rows():
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6)).astype(np.float32), rng.normal(size=(ROWS, 2)).astype(np.float32)


def tell(*words) -> None:
    print(*words, flush=True)


def digest(arrays) -> str:
    out = hashlib.sha256()
    for x in arrays:
        out.update(x.tobytes())
    return out.hexdigest()


def with_keras(folder: Path) -> None:
    """`BackupAndRestore`, which is what Keras has for interrupted training."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    x, y = rows()
    layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(1e-2), "mse")

    class Teller(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            tell("STEP", int(self.model.optimizer.iterations.value))
            time.sleep(PAUSE)

    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=EVERY)
    model.fit(x, y, SIZE, EPOCHS, verbose=0, callbacks=[backup, Teller()])
    tell("DIGEST", digest(model.get_weights()))


def with_lightning(folder: Path) -> None:
    """`ModelCheckpoint(save_last=True)` and `fit(ckpt_path="last")`."""
    import warnings

    import lightning
    import torch

    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    x, y = map(torch.from_numpy, rows())

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            nn = torch.nn
            self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 2))

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    class Teller(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            tell("STEP", trainer.global_step)
            time.sleep(PAUSE)

    saver = lightning.pytorch.callbacks.ModelCheckpoint(folder / "saved", save_last=True, every_n_train_steps=EVERY)
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[saver, Teller()], **off)
    net, data = Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), SIZE, shuffle=True)
    trainer.fit(net, data, ckpt_path="last")
    tell("DIGEST", digest([p.detach().numpy() for p in net.parameters()]))


TARGETS = {"keras": with_keras, "lightning": with_lightning}


def started(name: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, name, "--target", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder)


def ended(process: subprocess.Popen) -> tuple[list[int], str]:
    """The steps that a process told, and its digest or why there is none."""
    try:
        out, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return [], "hung"
    words = [line.split() for line in out.splitlines()]
    steps = [int(word[1]) for word in words if word[:1] == ["STEP"]]
    found = [word[1] for word in words if word[:1] == ["DIGEST"]]
    return steps, found[0] if found else "died"


def killed(name: str, folder: Path, after: int, delay: float) -> None:
    """A run that is killed `delay` seconds after it told so many steps, or at its end."""
    process = started(name, folder)
    assert process.stdout is not None
    for line in process.stdout:
        after -= line.startswith("STEP")
        if after <= 0:
            time.sleep(delay)
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()


def campaign(name: str, seeds: range) -> collections.Counter:
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as alone:
        _, wanted = ended(started(name, Path(alone)))
    for seed in seeds:
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory() as path:
            for _ in range(2):
                killed(name, Path(path), draw.randint(2, EPOCHS * ROWS // SIZE // 2), draw.random() * PAUSE)
            steps, found = ended(started(name, Path(path)))
        same = "same bits" if found == wanted else found if found in ("hung", "died") else "other bits, nothing said"
        counts.update({"runs": 1, "kills": 2, same: 1, "began again at the first step": bool(steps) and steps[0] == 1})
        print(f"  {seed}: {dict(counts)}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--seeds", default="0:10")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        return TARGETS[options.name](Path(options.target))
    counts = campaign(options.name, range(*map(int, options.seeds.split(":"))))
    row = {"what": f"{options.name}, kills", "seeds": options.seeds, "counts": dict(counts)}
    row |= {"python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d")}
    with open(Path(__file__).parent / "results" / "counts.jsonl", "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    return None


if __name__ == "__main__":
    main()
