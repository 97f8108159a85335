"""A causal transformer whose embedding is also its output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, seeded

NAME = "transformer"
VOCABULARY = 24
CONTEXT = 12
DIM = 16
HEADS = 2


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward.

    The query-key-value projection has no bias: the gradient of a key bias is zero, because softmax
    does not see a constant added to all scores of a query.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.projection = nn.Linear(DIM, DIM)
        self.feed_forward_norm = nn.LayerNorm(DIM)
        self.expand = nn.Linear(DIM, 2 * DIM)
        self.contract = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, dim) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        hidden = nn.functional.gelu(self.expand(self.feed_forward_norm(x)))
        out: Tensor = x + self.contract(hidden)
        return out


class Transformer(nn.Module):
    """Embeddings, two `TransformerBlock` units, a norm and the tied head, all but the blocks root.

    Both names of the tied weight belong to the root, so one parameter group holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        nn.init.normal_(self.position.weight, std=0.2)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) of token ids to (batch, time, vocabulary) of logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Transformer()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw tokens (4, 12) and their successors.

    Low ids are more frequent and mostly followed by the next id, so there is something to learn.
    """
    with drawing(NAME, rank, step, micro) as random:
        stream = (torch.rand(4, CONTEXT + 1, generator=random).square() * VOCABULARY).long()
        follow = torch.rand(4, CONTEXT, generator=random) < 0.5
    stream[:, 1:] = torch.where(follow, (stream[:, :-1] + 1) % VOCABULARY, stream[:, 1:])
    return {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next token, one forward."""
    logits = module(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


CASE = ModelCase(
    name=NAME,
    why="The embedding is the output projection: a wrapper that unties the two, counts the weight "
    "twice or keeps only one of its two gradients trains another model.",
    traits=frozenset({"tied", "tokens"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(TransformerBlock,),
)
