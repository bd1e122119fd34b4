import pytest
import torch

from ecorec import TTEmbeddingBag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("ranks", [(5,), (4, 6), (3, 4, 3)])
def test_a_gpu_gives_the_bags_and_gradients_of_the_cpu(ranks):
    rng = torch.Generator().manual_seed(0)
    ours = TTEmbeddingBag(3000, 20, tt_ranks=ranks, mode="sum", padding_idx=3, generator=rng)
    indices = torch.randint(0, 3000, (64,), generator=rng)
    offsets = torch.tensor([0, 10, 10, 40])
    weights = torch.rand(64, generator=rng)
    outputs, gradients = [], []
    for device in ("cpu", "cuda"):
        emb = ours.to(device)
        output = emb(indices.to(device), offsets.to(device), weights.to(device))
        grads = torch.autograd.grad(output.square().sum(), list(emb.cores))
        outputs.append(output.detach().cpu())
        gradients.append([grad.cpu() for grad in grads])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)
