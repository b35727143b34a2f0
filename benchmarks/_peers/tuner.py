"""Lightning's batch size finder on a GPT, within 1 GiB of address space beyond what there is: `[s, size, trials]`.

Runs in the environment of `with_lightning.py`.
"""

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.tuner import Tuner

warnings.filterwarnings("ignore")
torch.set_num_threads(2)
WIDTH, DEPTH, CONTEXT = 192, 4, 128
TRIED = []


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)])
        sizes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        self.qkv, self.out, self.up, self.down = (torch.nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (part.reshape(n, t, -1, 64).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(WIDTH, -1))
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 8
        self.embed, self.head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(DEPTH)))

    def training_step(self, rows, _):
        TRIED.append(len(rows))
        logits = self.head(self.blocks(self.embed(rows[:, :-1])))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

    def train_dataloader(self):
        rows = torch.randint(0, 256, (4096, CONTEXT + 1))
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)


model = GPT()
off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False))
loss = model.training_step(torch.randint(0, 256, (1, CONTEXT + 1)), 0)
loss.backward()  # what torch takes once is not the batch's
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (1 << 30),) * 2)
TRIED.clear()
start = time.perf_counter()
size = Tuner(trainer).scale_batch_size(model, mode=sys.argv[1], init_val=8)
print(json.dumps([time.perf_counter() - start, size, len(dict.fromkeys(TRIED))]))
