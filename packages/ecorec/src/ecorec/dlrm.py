"""A deep learning recommendation model: dense features, pooled embeddings, their interactions."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Logits of samples with C dense features and `bags` bags of one embedding table.

    A bottom MLP makes a vector of D numbers of the dense features; the dot products of all pairs
    of it and the pooled embeddings, together with these vectors themselves, go to a top MLP.

    Args:
        table: called with (indices [V], offsets [B * bags + 1]); returns [B * bags, D].
        dense_features: C.
        bags: bags of a sample.
        embedding_dim: D.
        hidden: width of the hidden layers (half of it before the output).

    Source: Naumov et al., Deep Learning Recommendation Model, 2019 (arXiv 1906.00091).
    """

    def __init__(
        self,
        table: nn.Module,
        dense_features: int,
        bags: int,
        embedding_dim: int,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.table = table
        vectors = bags + 1
        self.pairs: Tensor
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        self.bottom = mlp(dense_features, hidden, embedding_dim)
        self.top = mlp(vectors * embedding_dim + self.pairs.shape[1], hidden, hidden // 2, 1)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Logits [B] for dense [B, C] and the bags of all samples, sample by sample."""
        bottom = self.bottom(dense)
        pooled = self.table(indices, offsets).view(len(dense), -1, bottom.shape[1])
        vectors = torch.cat([bottom[:, None], pooled], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([vectors.flatten(1), dots], dim=1))
        return logits.squeeze(1)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them, none after the last."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])
