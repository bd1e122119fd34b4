import torch
from torch import nn

from ecorec.dlrm import DLRM


def test_a_logit_is_that_of_the_sample_alone_written_out():
    torch.manual_seed(0)
    table = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True)
    model = DLRM(table, dense_features=3, bags=2, embedding_dim=4, hidden=8)
    dense = torch.randn(2, 3)
    indices, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 3, 3, 4])
    logits = model(dense, indices, offsets)
    assert logits.shape == (2,)
    bags = [[[1], [2, 3]], [[], [4]]]
    for sample in range(2):
        vectors = [model.bottom(dense[sample])]
        vectors += [table.weight[bag].sum(0) for bag in bags[sample]]
        dots = [vectors[i] @ vectors[j] for i, j in [(0, 1), (0, 2), (1, 2)]]
        expected = model.top(torch.cat([*vectors, torch.stack(dots)]))
        torch.testing.assert_close(logits[sample], expected[0])
