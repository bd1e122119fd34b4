"""A chain, a placement and its traffic; also what CI runs from outside the checkout."""

import torch

import mcfuser

chain = mcfuser.chain("bmk,bkn->bmn; gelu; bmn,bnh->bmh")
a, b, d = torch.randn(1, 40, 24), torch.randn(1, 24, 33), torch.randn(1, 33, 17)
sizes = chain.sizes([a.shape, b.shape, d.shape])
placed = mcfuser.place(chain, sizes, "mn(k,h)", {"m": 16, "n": 16, "k": 16, "h": 16})
out, moved = placed.execute(a, b, d)
truth = mcfuser.reference.run(chain, a.double(), b.double(), d.double())
assert torch.allclose(out, truth, atol=1e-12)
assert moved == placed.traffic()
print(placed, moved)
