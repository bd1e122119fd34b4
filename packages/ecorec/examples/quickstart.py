"""A table of ten million rows in two megabytes, trained with any torch optimiser."""

import torch

import ecorec

rows, columns = 10_000_000, 32
table = ecorec.TTEmbeddingBag(rows, columns, tt_ranks=32, mode="sum")  # nn.EmbeddingBag's call
print(table.spec.explain())

optimiser = torch.optim.Adagrad(table.parameters(), lr=0.05)
lookups = torch.randint(rows, (256, 20))  # [B, L]
wanted = torch.randn(256, columns)
losses = []
for _ in range(20):
    loss = (table(lookups) - wanted).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0]
