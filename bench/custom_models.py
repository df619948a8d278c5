"""Models in plain torch that transformers does not have, or has in a form that breaks the graph.

Each is complete with its loss: `model(*args)` is a scalar. Loops have a fixed length, so that one graph holds
the whole step.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8


class Chain(nn.Module):
    """`layers` times the sine of one vector, its only parameter: the textbook chain of equal layers."""

    def __init__(self, layers: int, elements: int) -> None:
        super().__init__()
        self.layers = layers
        self.start = nn.Parameter(torch.randn(elements))

    def forward(self) -> Tensor:
        hidden: Tensor = self.start
        for _ in range(self.layers):
            hidden = torch.sin(hidden)
        return hidden.sum()


class UnrolledLSTM(nn.Module):
    """A character LSTM, its time steps a Python loop, each with its own readout."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.inputs = nn.Linear(width, 4 * width)
        self.recurrent = nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        hidden = torch.zeros_like(embedded[:, 0])
        cell = hidden
        readouts = []
        for token in embedded.unbind(1):
            gates = self.inputs(token) + self.recurrent(hidden)
            enter, keep, candidate, leave = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            readouts.append(self.head(hidden))
        return F.cross_entropy(torch.stack(readouts, dim=1).flatten(0, 1), targets.flatten())


class DLRM(nn.Module):
    """Facebook's recommender: dense features and embedding bags, their pairwise dot products, binary cross entropy."""

    left: Tensor
    right: Tensor

    def __init__(self, tables: int, rows: int, width: int, features: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        below = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("left", below[0])
        self.register_buffer("right", below[1])
        self.top = nn.Sequential(
            nn.Linear(width + below.shape[1], 2 * hidden),
            nn.ReLU(),
            nn.Linear(2 * hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        """`sparse` is [batch, tables, rows per bag]."""
        bottom = self.bottom(dense)
        bags = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *bags], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.left, self.right]
        logits = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class UNet(nn.Module):
    """A diffusion U-Net: two residual blocks a level, skips concatenated, attention in the middle, MSE of the noise."""

    frequencies: Tensor

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        time_width = 4 * width
        frequencies = torch.exp(torch.arange(width // 2) * (-math.log(10_000) / (width // 2)))
        self.register_buffer("frequencies", frequencies)
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        current, skips = width, [width]
        for level in range(levels):
            wide = width * 2**level
            self.down.append(
                nn.ModuleList([ResidualBlock(current, wide, time_width), ResidualBlock(wide, wide, time_width)])
            )
            current = wide
            skips += [wide, wide]
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                skips.append(wide)
        self.middle_in = ResidualBlock(current, current, time_width)
        self.attention = ImageAttention(current)
        self.middle_out = ResidualBlock(current, current, time_width)
        for level in reversed(range(levels)):
            wide = width * 2**level
            blocks = nn.ModuleList()
            for _ in range(3):
                blocks.append(ResidualBlock(current + skips.pop(), wide, time_width))
                current = wide
            self.up.append(blocks)
            if level:
                self.grow.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(GROUPS, current), nn.SiLU(), nn.Conv2d(current, channels, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        angles = times[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        hidden = self.enter(images)
        skips = [hidden]
        for level, blocks in enumerate(self.down):
            for block in cast(nn.ModuleList, blocks):
                hidden = block(hidden, time)
                skips.append(hidden)
            if level < len(self.shrink):
                hidden = self.shrink[level](hidden)
                skips.append(hidden)
        hidden = self.middle_out(self.attention(self.middle_in(hidden, time)), time)
        for level, blocks in enumerate(self.up):
            for block in cast(nn.ModuleList, blocks):
                hidden = block(torch.cat([hidden, skips.pop()], dim=1), time)
            if level < len(self.grow):
                hidden = self.grow[level](F.interpolate(hidden, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(hidden), noise)


class ResidualBlock(nn.Module):
    """Two normalized convolutions with the time added between them, and a residual, projected if the width changes."""

    def __init__(self, width_in: int, width_out: int, time_width: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(GROUPS, width_in)
        self.conv_in = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.time = nn.Linear(time_width, width_out)
        self.norm_out = nn.GroupNorm(GROUPS, width_out)
        self.conv_out = nn.Conv2d(width_out, width_out, 3, padding=1)
        self.project = nn.Identity() if width_in == width_out else nn.Conv2d(width_in, width_out, 1)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        inner = self.conv_in(F.silu(self.norm_in(hidden)))
        inner = inner + self.time(F.silu(time))[:, :, None, None]
        return self.project(hidden) + self.conv_out(F.silu(self.norm_out(inner)))


class ImageAttention(nn.Module):
    """Self-attention with one head over the pixels, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.inputs = nn.Conv1d(width, 3 * width, 1)
        self.project = nn.Conv1d(width, width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        pixels = self.norm(hidden).flatten(2)
        query, key, value = self.inputs(pixels).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value).squeeze(1)
        return hidden + self.project(mixed.transpose(1, 2)).view_as(hidden)


class Mamba(nn.Module):
    """A language model of selective state spaces: residual Mamba blocks behind RMSNorm, next-token cross entropy."""

    def __init__(self, vocabulary: int, layers: int, width: int, states: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(layers))
        self.blocks = nn.ModuleList(MambaBlock(width, states) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        logits = self.head(self.norm(hidden))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class MambaBlock(nn.Module):
    """Projection, causal depthwise convolution, selective scan, gate, projection; twice as wide inside as outside."""

    def __init__(self, width: int, states: int, kernel: int = 4) -> None:
        super().__init__()
        inner, rank = 2 * width, max(width // 16, 1)
        self.sizes = [rank, states, states]
        self.inputs = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, kernel, padding=kernel - 1, groups=inner)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False)
        self.step = nn.Linear(rank, inner)
        self.log_rate = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.project = nn.Linear(inner, width, bias=False)
        with torch.no_grad():  # Mamba's own: softplus(bias) between 0.001 and 0.1
            first = torch.exp(torch.rand(inner) * math.log(100) + math.log(0.001))
            self.step.bias.copy_(first + torch.log(-torch.expm1(-first)))

    def forward(self, hidden: Tensor) -> Tensor:
        inner, gate = self.inputs(hidden).chunk(2, dim=-1)
        causal = self.conv(inner.transpose(1, 2))[..., : inner.shape[1]]
        inner = F.silu(causal.transpose(1, 2))
        rank, into, out = self.select(inner).split(self.sizes, dim=-1)
        step = F.softplus(self.step(rank))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.log_rate))
        drive = (step * inner).unsqueeze(-1) * into.unsqueeze(2)
        scanned = (linear_scan(decay, drive) * out.unsqueeze(2)).sum(-1)
        return self.project((scanned + self.skip * inner) * F.silu(gate))


def linear_scan(decay: Tensor, drive: Tensor) -> Tensor:
    """The states s[t] = decay[t] * s[t - 1] + drive[t] along dimension 1, in log2(length) doublings."""
    length, span = drive.shape[1], 1
    while span < length:
        drive = torch.cat([drive[:, :span], drive[:, span:] + decay[:, span:] * drive[:, :-span]], dim=1)
        decay = torch.cat([decay[:, :span], decay[:, span:] * decay[:, :-span]], dim=1)
        span *= 2
    return drive
