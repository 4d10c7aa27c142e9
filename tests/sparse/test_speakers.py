"""Language models that go on speaking when they are sparse: `generate`, caches, weight decay, optional inputs."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import driveprune as dp
from tests.sparse.literal import assert_near, masked
from tests.sparse.test_decay import configure_optimizers

WORDS = 50


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 24}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=WORDS, **ids))


class NanoGPT(nn.Module):
    """As nanoGPT: targets if there are some, tied embeddings, a generate of its own."""

    def __init__(self):
        super().__init__()
        self.block_size = 12
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(12, 16)
        self.norm, self.attend, self.out = nn.LayerNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets=None):
        t = idx.size(1)
        assert t <= self.block_size
        x = self.tokens(idx) + self.places(torch.arange(t, device=idx.device))
        q, k, v = self.attend(self.norm(x)).split(16, dim=2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            logits, _ = self(idx[:, -self.block_size :])
            idx = torch.cat([idx, logits[:, -1].argmax(1, keepdim=True)], 1)
        return idx


def sparse_of(net, layers="sparse"):
    net.eval()
    generator = torch.Generator().manual_seed(0)
    mask = {name: torch.rand(weight.shape, generator=generator) < 0.3 for name, weight in dp.prunable(net).items()}
    dp.apply(net, mask)
    return mask, dp.sparsify(net, mask, {next(iter(inputs(net))): torch.randint(WORDS, (1, 8))}, layers=layers)


def inputs(net):
    return ("idx",) if isinstance(net, NanoGPT) else ("input_ids",)


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
@pytest.mark.parametrize("make", [gpt2, llama])
def test_models_of_transformers_generate(make):
    torch.manual_seed(0)
    net = make()
    _, fast = sparse_of(net)
    assert isinstance(fast, type(net))
    assert fast.config.vocab_size == WORDS
    ids = torch.randint(1, WORDS, (2, 6))
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for weight in fast.parameters():
            weight.mul_(1.2)
    dense = dp.densify(fast)
    for each in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(each.generate(ids, **how), dense.generate(ids, **how))
    assert not torch.equal(fast(ids).logits, net(ids).logits)


@pytest.mark.filterwarnings("ignore:only .* of the masked weights")
def test_gpt_2_is_told_that_its_layers_are_unknown():
    torch.manual_seed(0)
    found = dp.explain(sparse_of(gpt2())[1])
    assert {each.reason for each in found.layers} == {
        "Conv1D of transformers is not a layer that the sparse kernels know"
    }


def test_a_nano_gpt():
    torch.manual_seed(0)
    net = NanoGPT()
    mask, fast = sparse_of(net)
    ids = torch.randint(WORDS, (2, 6))
    assert torch.equal(fast.generate(ids, 9), net.generate(ids, 9))
    for given in ((ids,), (ids, ids)):
        for found, expected in zip(fast(*given), masked(net, mask)(*given), strict=True):
            assert (found is None) is (expected is None)
            if found is not None:
                assert_near(found, expected)
    optimizer = configure_optimizers(fast)
    fast(ids, ids)[1].backward()
    with pytest.warns(dp.SparseWarning, match="no weight of a sparse layer decays"):
        optimizer.step()
    twin, moved = dp.sparsify(net, mask, {"idx": ids[:1]}, configure_optimizers(net), layers="sparse")
    decaying = {id(weight) for weight in moved.param_groups[0]["params"]}
    assert {name for name, weight in twin.named_parameters() if id(weight) in decaying} == {
        name for name, weight in net.named_parameters() if weight.dim() >= 2
    }
    twin(ids, ids)[1].backward()
    moved.step()
