import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import driveprune as dp
from driveprune.mask import bits, check_sparsity, empty_layers, kept_count, masked, parameters, unwrap, zero_removed
from tests.nets import Recurrent, Transformer, convnet, mlp, same, snapshot


def names(model, **options):
    return list(dp.prunable(model, **options))


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 4), nn.Conv1d(3, 4, 2), nn.Conv2d(3, 4, 2), nn.Conv3d(3, 4, 2), nn.ConvTranspose2d(3, 4, 2)],
    ids=lambda layer: type(layer).__name__,
)
def test_weights_of_layers_are_prunable_and_biases_are_not(layer):
    assert names(layer) == ["weight"]


def test_recurrent_weights_are_prunable():
    assert names(nn.LSTM(3, 4, proj_size=2)) == ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]


def test_attention_projections_are_prunable_together_or_apart():
    assert names(nn.MultiheadAttention(4, 2)) == ["in_proj_weight", "out_proj.weight"]
    apart = names(nn.MultiheadAttention(4, 2, kdim=3, vdim=5))
    assert apart == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]


def test_embeddings_positions_and_normalisation_are_left_out():
    assert names(Transformer()) == ["attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]


def test_include_brings_in_embeddings_and_positions():
    found = names(Transformer(), include=["tokens.weight", "pos_*"])
    assert set(found) - set(names(Transformer())) == {"tokens.weight", "pos_table"}


def test_include_never_brings_in_biases_or_normalisation():
    with pytest.raises(ValueError, match="include pattern 'norm.weight' matches no weight"):
        dp.prunable(Transformer(), include="norm.weight")


def test_exclude_leaves_out():
    assert names(mlp(), exclude="4.*") == ["0.weight", "2.weight"]
    with pytest.raises(ValueError, match="exclude pattern 'fc'"):
        dp.prunable(mlp(), exclude=["fc"])


def test_bare_matrices_of_own_modules_are_weights_and_scales_are_not():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 4))
            self.scale = nn.Parameter(torch.ones(3, 1, 1))

    assert names(Own()) == ["matrix"]


class Holder(nn.Module):
    """A module of one's own that holds parameters of these names."""

    def __init__(self, *names):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        for name in names:
            setattr(self, name, nn.Parameter(torch.randn(3, 4)))


def test_parameters_of_other_modules_are_weights_if_they_are_called_so():
    called = ["weight", "kernel", "W", "w1", "wq", "w_out", "q", "gate_up_proj", "x_proj_weight", "text_projection"]
    assert names(Holder(*called)) == [*called, "fc.weight"]


def test_other_parameters_are_left_out_and_named_once_with_the_way_to_have_them():
    net = Holder("A_log", "codevectors", "weight")
    with pytest.warns(UserWarning, match=r"not pruned: A_log, codevectors, which belong to no known kind") as caught:
        assert names(net) == ["weight", "fc.weight"]
    assert len(caught) == 1
    assert "include=['*A_log', '*codevectors']" in str(caught[0].message)
    assert names(net, include=["*A_log", "*codevectors"]) == ["A_log", "codevectors", "weight", "fc.weight"]
    assert names(net, exclude=["*A_log", "*codevectors"]) == ["weight", "fc.weight"]


def test_tables_and_scales_of_other_modules_are_left_out_without_a_word():
    net = Holder("pos_embed", "relative_position_bias_table", "token_weights", "weight")
    net.weight_scale = nn.Parameter(torch.ones(4, 1, 1))
    assert names(net) == ["weight", "fc.weight"]


def test_own_kinds_of_linear_layers_and_experts_are_weights():
    class Own(nn.Linear):
        pass

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    assert names(nn.Sequential(Own(3, 3), Written())) == ["0.weight", "1.weight"]
    stack = nn.Module()
    stack.weights = nn.ParameterList(torch.randn(3, 3) for _ in range(2))
    stack.experts = nn.ParameterDict({"w1": torch.randn(2, 3, 4), "scales": torch.randn(2, 4)})
    assert set(names(stack)) == {"weights.0", "weights.1", "experts.w1", "experts.scales"}
    stack.mixtures = nn.ParameterList(torch.randn(3, 3) for _ in range(2))
    with pytest.warns(UserWarning, match=r"not pruned: mixtures\.0, mixtures\.1.*include=\['\*mixtures\.\*'\]"):
        assert set(names(stack)) == {"weights.0", "weights.1", "experts.w1", "experts.scales"}
    assert len(names(stack, include="*mixtures.*")) == 6


def test_tied_weights_count_once():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    assert names(net) == ["0.weight"]
    shared = nn.Linear(4, 4)
    assert names(nn.Sequential(shared, nn.ReLU(), shared)) == ["0.weight"]


def test_a_weight_tied_to_an_embedding_is_an_embedding():
    net = nn.ModuleDict({"tokens": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False), "body": nn.Linear(4, 4)})
    net["head"].weight = net["tokens"].weight
    assert names(net) == ["body.weight"]
    assert names(net, include="head.weight") == ["tokens.weight", "body.weight"]


def test_frozen_weights_are_left_alone_unless_asked_for():
    net = mlp()
    net[0].weight.requires_grad_(False)
    assert names(net) == ["2.weight", "4.weight"]
    assert names(net, frozen=True) == ["0.weight", "2.weight", "4.weight"]


def test_parametrised_weights_only_by_include():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    assert names(net) == ["1.weight"]
    assert "0.parametrizations.weight.original1" in names(net, include="*.original1")


def test_lazy_modules_say_what_to_do():
    with pytest.raises(ValueError, match="run one forward first"):
        dp.prunable(nn.Sequential(nn.LazyLinear(3)))


def test_nothing_prunable():
    with pytest.raises(ValueError, match="nothing to prune"):
        dp.prunable(nn.BatchNorm2d(4))


def test_names_are_those_of_the_unwrapped_model():
    net = mlp()
    plain = names(net)
    assert names(nn.DataParallel(net)) == plain
    assert names(torch.compile(net, backend="eager")) == plain
    assert names(torch.optim.swa_utils.AveragedModel(net)) == plain
    net[2] = torch.compile(net[2], backend="eager")
    assert names(net) == plain
    assert unwrap(torch.compile(nn.DataParallel(net), backend="eager")) is net


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_removed_leaves_positive_zero_whatever_was_there(dtype):
    values = torch.tensor([-3.0, float("inf"), float("nan"), -0.0, 2.0, -5.0], dtype=dtype)
    kept = torch.tensor([False, False, False, False, True, True])
    zero_removed(values, bits(kept, values))
    assert values.tolist() == [0, 0, 0, 0, 2, -5]
    assert not values[:4].signbit().any()


def test_apply_goes_by_logical_index_in_any_memory_format():
    plain, last = convnet(), convnet().to(memory_format=torch.channels_last)
    kept = {name: torch.rand(w.shape) < 0.3 for name, w in dp.prunable(plain).items()}
    dp.apply(plain, kept)
    dp.apply(last, kept)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), last.parameters(), strict=True))
    assert all(torch.equal(dict(plain.named_parameters())[n] != 0, k) for n, k in kept.items())


def test_masked_is_only_for_a_while():
    net = mlp()
    before = snapshot(net)
    kept = {"0.weight": torch.zeros(40, 6, dtype=torch.bool)}
    with masked(net, kept):
        assert not net[0].weight.any()
    assert same(before, snapshot(net))


def test_a_mask_that_does_not_fit_names_the_layer_and_changes_nothing():
    net = mlp()
    before = snapshot(net)
    for bad, message in [
        ({"7.weight": torch.ones(2, 2, dtype=torch.bool)}, "no parameter '7.weight'"),
        ({"0.weight": torch.ones(2, 2, dtype=torch.bool)}, r"0.weight has shape \(40, 6\), its mask \(2, 2\)"),
        ({"0.weight": torch.ones(40, 6)}, "must be boolean"),
    ]:
        with pytest.raises(ValueError, match=message):
            dp.apply(net, bad)
    assert same(before, snapshot(net))


@pytest.mark.parametrize(("bad", "hint"), [(98, "did you mean 0.98"), (1.0, "got 1.0"), (-0.1, "got -0.1")])
def test_sparsity_outside_its_range(bad, hint):
    with pytest.raises(ValueError, match=rf"sparsity must be in \[0, 1\).*{hint}"):
        check_sparsity(bad)


def test_sparsity_of_another_kind():
    with pytest.raises(TypeError, match="got 'high'"):
        check_sparsity("high")
    with pytest.raises(ValueError, match="got nan"):
        check_sparsity(float("nan"))


def test_counts():
    assert kept_count(1000, 0.5) == 500
    assert kept_count(10, 0.999) == 1
    assert kept_count(23_262_912, 0.993) == 162_840
    mask = {"a": torch.tensor([True, False]), "b": torch.tensor([False, False])}
    assert dp.sparsity(mask) == 0.75
    assert empty_layers(mask) == ["b"]


def test_masks_remember_where_they_came_from():
    mask = dp.Mask({"a": torch.ones(2, dtype=torch.bool)}, {"method": "drive"})
    assert dp.Mask(mask).provenance == {"method": "drive"}
    assert copy.deepcopy(mask).provenance == {"method": "drive"}


def test_parameters_of_a_recurrent_net():
    assert len(parameters(Recurrent())) == 10


def test_scales_lists_and_tables_of_own_modules_are_no_weights():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 1, 1))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
            self.pos_embed = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])
            self.biases = nn.ParameterDict({"a": nn.Parameter(torch.randn(4, 4))})
            self.pe = nn.Parameter(torch.randn(4, 4))
            self.experts = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])

    assert names(Own()) == ["experts.0"]


def test_old_parametrisations_are_left_out():
    lstm = nn.LSTM(3, 4)
    prune.identity(lstm, "weight_ih_l0")
    assert names(lstm) == ["weight_hh_l0"]


def test_a_shared_module_can_be_named_by_each_of_its_names():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2))
    assert names(net, exclude="2.weight") == ["3.weight"]


def test_including_a_frozen_weight_needs_frozen():
    net = Transformer()
    net.tokens.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen=True"):
        dp.prunable(net, include="tokens.weight")
    assert "tokens.weight" in names(net, include="tokens.weight", frozen=True)


def test_the_mask_of_a_network_that_another_program_has_stored(tmp_path):
    net = convnet()
    mask = dp.prune(net, method="erk", sparsity=0.8)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = convnet(seed=1)
    other.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    found = dp.mask_of(other)
    assert same(dict(found), dict(mask))
    assert list(dp.mask_of(other, exclude="4.*")) == ["0.weight", "10.weight"]
