"""The same models in torch: compiled, bfloat16 by autocast, fused AdamW, its own attention."""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu import models
from benchmarks.gpu.results import Results

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
synchronize = torch.cuda.synchronize if CUDA else lambda: None


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cos, sin):
        n, t, width = x.shape
        q, k, v = (y.view(n, t, -1, 64).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))

        def rotate(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, width, depth, context):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 256, bias=False)
        angles = torch.arange(context)[:, None] * 1000.0 ** -torch.linspace(0, 1, 32)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, batch):
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class CNN(nn.Module):
    def __init__(self, widths):
        super().__init__()
        conv = lambda a, b, s: nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.GroupNorm(8, b))
        ins = [3, *widths]
        self.parts = nn.ModuleList(
            nn.ModuleList([conv(a, b, 2), conv(b, b, 1), conv(b, b, 1)]) for a, b in zip(ins, widths, strict=False)
        )
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, batch):
        x, y = batch
        for a, b, c in self.parts:
            x = F.relu(a(x))
            x = F.relu(x + c(F.relu(b(x))))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), y)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, batch):
        return F.cross_entropy(self.b(F.relu(self.a(batch[0]))), batch[1])


def median_ms(step, rounds, steps):
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start) / steps)
    return statistics.median(times)


def step_of(net, batch, optimizer, *, bfloat16=True, compiled=True):
    forward = torch.compile(net) if compiled else net

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bfloat16):
            loss = forward(batch)
        loss.backward()
        optimizer.step()

    return step


def graph_of(net, batch, optimizer):
    """The replay of a whole step, captured as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            net(batch).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        net(batch).backward()
        optimizer.step()
    return graph.replay


def launch(results: Results, tiny: bool) -> None:
    """The MLP of a few launches: eager, compiled, and captured as one CUDA graph; float32."""
    note_versions(results)
    batch = torch.randn(32, 64, device=DEVICE), torch.randint(0, 10, (32,), device=DEVICE)
    adam = lambda net, **options: torch.optim.Adam(net.parameters(), lr=1e-3, fused=True, **options)
    turns = {"rounds": 3, "steps": 20} if tiny else {"rounds": 11, "steps": 200}
    microseconds = {}
    for name, compiled in (("eager, fused Adam", False), ("compiled, fused Adam", True)):
        net = MLP().to(DEVICE)
        step = step_of(net, batch, adam(net), bfloat16=False, compiled=compiled)
        for _ in range(3):
            step()
        microseconds[name] = 1e3 * median_ms(step, **turns)
    if CUDA:
        net = MLP().to(DEVICE)
        microseconds["one CUDA graph"] = 1e3 * median_ms(graph_of(net, batch, adam(net, capturable=True)), **turns)
    results.note("us/step", microseconds)


def cnn(results: Results, tiny: bool) -> None:
    note_versions(results)
    widths, rows = ((16, 16), 4) if tiny else ((128, 256, 512, 512), 1024)
    net = CNN(widths).to(DEVICE).to(memory_format=torch.channels_last)
    x = torch.randn(rows, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    batch = x, torch.randint(0, 10, (rows,), device=DEVICE)
    ms = measure(results, net, batch, torch.optim.Adam(net.parameters(), lr=1e-3, fused=True), tiny)
    results.note("images/s", rows / ms * 1e3)


def gpt(results: Results, tiny: bool, name: str = "gpt") -> None:
    note_versions(results)
    width, depth, rows, context = shape = models.SHAPES["tiny" if tiny else name]
    net = GPT(width, depth, context).to(DEVICE)
    batch = torch.randint(0, 256, (rows, context + 1), device=DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    ms = measure(results, net, batch, optimizer, tiny)
    results.note("tokens/s", rows * context / ms * 1e3)
    flops = models.gpt_flops(sum(p.numel() for p in net.parameters()), shape)
    results.note("MFU of 989 TFLOP/s", flops / ms * 1e3 / 989e12)


def gpt_small(results: Results, tiny: bool) -> None:
    gpt(results, tiny, "gpt_small")


def note_versions(results: Results) -> None:
    torch.manual_seed(0)
    results.note("torch", f"{torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'cpu'}")


def measure(results: Results, net, batch, optimizer, tiny: bool) -> float:
    """Milliseconds of a compiled step in bfloat16; notes them, the seconds of the first one, and the peak of memory."""
    step, start = step_of(net, batch, optimizer), time.perf_counter()
    step()
    synchronize()
    results.note("first step, s", time.perf_counter() - start)
    step(), step()
    synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(step, 3 if tiny else 5, 2 if tiny else 8)
    results.note("ms", ms)
    if CUDA:
        results.note("peak GB", torch.cuda.max_memory_allocated() / 1e9)
    return ms
