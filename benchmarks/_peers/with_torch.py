# /// script
# dependencies = ["torch==2.13.0+cpu", "jax==0.10.2", "numpy"]
# [tool.benchmarks]
# pip = ["--editable", "."]
# ///
"""Plain torch: the loop by hand, with Adam as it is and in one fused kernel."""

import itertools

import torch
from _protocol import ready_batches, serve

torch.set_num_threads(1)  # the faster one for a model of this size


def looping(fused):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
    batches = itertools.cycle([(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in ready_batches()])

    def burst(n):
        for x, y in itertools.islice(batches, n):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return burst


serve({"plain": lambda: looping(False), "fused": lambda: looping(True)})
