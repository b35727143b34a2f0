# /// script
# dependencies = ["lightning==2.6.6", "torch==2.13.0+cpu", "numpy"]
# ///
"""Lightning: `fit` over ready batches; no logger, bar or checkpoint."""

import warnings

import lightning
import torch
from _protocol import ready_batches, serve

warnings.filterwarnings("ignore")
torch.set_num_threads(1)  # the faster one for a model of this size


class MLP(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Ready:  # a list would be many loaders
    def __init__(self):
        self.batches = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in ready_batches()]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def fitting():
    model, batches = MLP(), Ready()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

    def burst(n):
        lightning.Trainer(max_steps=n, accelerator="cpu", **dict.fromkeys(off, False)).fit(model, batches)

    return burst


serve({"fit": fitting})
