"""A small character-level GPT in plain torch: the model of the main job (`bench.train`)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CharGPT(nn.Module):
    """Pre-norm transformer over characters; `model(tokens, targets)` is the mean cross entropy in nats.

    `attention` is "sdpa" (torch's fused attention) or "math" (the probabilities as a tensor of their own).
    Dropout acts on the embeddings, the attention probabilities and both residual branches.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        attention: str = "sdpa",
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialize(layers)
        if tied:
            self.head.weight = self.tokens.weight

    def _initialize(self, layers: int) -> None:
        """GPT-2's: normal weights, and residual branches that add up to the same variance at any depth."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and a four times wider GELU layer, each normalized before and added to the residual."""

    def __init__(self, width: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, attention)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden)))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(hidden)))


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float, kind: str) -> None:
        super().__init__()
        if kind not in ("sdpa", "math"):
            raise ValueError(f"attention must be 'sdpa' or 'math', not {kind!r}")
        if width % heads:
            raise ValueError(f"width {width} does not divide into {heads} heads")
        self.heads = heads
        self.kind = kind
        self.dropout = nn.Dropout(dropout)
        self.inputs = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.inputs(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "sdpa":
            rate = self.dropout.p if self.training else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        else:
            mixed = self._plain(query, key, value)
        return self.project(mixed.transpose(1, 2).flatten(2))

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return self.dropout(scores.masked_fill(future, -math.inf).softmax(-1)) @ value
