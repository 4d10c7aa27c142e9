import pytest
import torch
from sklearn.datasets import load_digits

import driveprune as dp
from driveprune.train import Batches, accuracy, train
from tests.nets import same


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    x = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) - 5) / 6
    y = torch.tensor(y)
    return Batches(x[:1500], y[:1500], size=100), Batches(x[1500:], y[1500:], size=300)


def fit(digits, method, seed=0, **options):
    torch.manual_seed(seed)
    net = dp.models.digits_net(width=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.get("epochs", 5))
    return net, train(
        net, optimizer, digits[0], test=digits[1], method=method, scheduler=scheduler,
        **{"sparsity": 0.9, "epochs": 5, **options},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "knobs"), [("drive", {"early_epochs": 1}), ("imp", {"cycles": 3, "cycle_epochs": 1})]
)
def test_drive_and_imp_learn_digits_end_to_end(digits, method, knobs):
    net, trained = fit(digits, method, knobs=knobs)
    assert dp.sparsity(trained.mask) == pytest.approx(0.9, abs=1e-4)
    assert trained.accuracies[-1] > 0.9
    assert len(trained.accuracies) == (5 if method == "drive" else 8)
    assert trained.accuracies[-1] == accuracy(net, digits[1])
    assert 0 < trained.pruning_seconds < trained.seconds
    weights = dp.prunable(net)
    assert all(not weights[name][~kept].any() for name, kept in trained.mask.items())


def test_the_same_seed_gives_the_same_bits(digits):
    nets = [fit(digits, "drive", epochs=2, knobs={"early_epochs": 1, "cuts": 5})[0] for _ in range(2)]
    assert same(nets[0].state_dict(), nets[1].state_dict())


def test_batches_cover_all_examples_in_an_order_of_the_epoch():
    data = Batches(torch.arange(10), torch.arange(10), size=4, seed=1)
    epochs = [torch.cat([x for x, _ in data.epoch(number)]).tolist() for number in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == list(range(10))
    assert len(data) == 3
    assert [x.tolist() for x, _ in data] == [x.tolist() for x, _ in data]
