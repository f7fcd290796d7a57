"""A byte-level transformer whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clowder

_BYTES = 256
# Each position also sees hashes of its last 2, 3 and 4 bytes, which a small model would spend its first layers on.
_NGRAMS = (2, 3, 4)


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    width: int
    heads: int
    experts: int
    topk: int
    intermediate: int
    shared_intermediate: int
    context: int
    ngram_buckets: int


class CodeModel(nn.Module):
    """Predicts the next byte of each position.

    Parameters are fp32, and so are the dense parts; the MoE layers run in bf16 under autocast.
    """

    def __init__(self, config: ModelConfig, workspace: clowder.Workspace) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(_BYTES, config.width)
        self.ngram_embedding = nn.Embedding(len(_NGRAMS) * config.ngram_buckets, config.width)
        self.blocks = nn.ModuleList(Block(config, workspace) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        for embedding in (self.embedding, self.ngram_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] for tokens [batch, length]."""
        x = self.embedding(tokens) + self.ngram_embedding(self._ngrams(tokens)).sum(dim=2)
        rotation = rotary_angles(tokens.shape[1], self.config.width // self.config.heads)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)

    def losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats, and the layers' load-balance losses added up."""
        logits = self(tokens)
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return cross_entropy, torch.stack([block.moe.aux_loss for block in self.blocks]).sum()

    def expert_counts(self) -> list[list[int]]:
        """Rows of each expert in the last call, for each layer."""
        return [block.moe.expert_counts.tolist() for block in self.blocks]

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, seed: int, temperature: float = 0.6) -> bytes:
        """`prompt` and `num_bytes` more, sampled."""
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(num_bytes):
            logits = self(torch.tensor([text[-self.config.context :]]))[0, -1]
            probabilities = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text)

    def _ngrams(self, tokens: Tensor) -> Tensor:
        """Buckets [batch, length, len(_NGRAMS)] of the last n bytes at each position."""
        buckets = []
        hashed = tokens
        for n in range(2, max(_NGRAMS) + 1):
            earlier = F.pad(tokens, (n - 1, 0))[:, : tokens.shape[1]]
            hashed = (hashed * 1_000_003 + earlier + 1) % 2_147_483_647
            if n in _NGRAMS:
                buckets.append(hashed % self.config.ngram_buckets + len(buckets) * self.config.ngram_buckets)
        return torch.stack(buckets, dim=2)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, workspace: clowder.Workspace) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width)
        self.moe = clowder.nn.MoE(
            config.width,
            config.intermediate,
            config.experts,
            config.topk,
            shared_intermediate=config.shared_intermediate,
            workspace=workspace,
            num_layers=config.layers,
            dtype=torch.float32,
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        normed = self.moe_norm(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.moe(normed)
        return x + y


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


def rotary_angles(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_width / 2] of rotary position embeddings (Su et al. 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
