import torch

from driveprune.seeds import generator_for, seed_for


def test_counters_are_frozen():
    """Runs must repeat for years: these numbers may not change."""
    assert seed_for(0, "cut", 0, 0, 0) == 7146631625938088623
    assert seed_for(1, "epoch", 3) == 8029823718139798625


def test_generators_repeat():
    draws = [torch.rand(3, generator=generator_for(7, "score", 1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], torch.rand(3, generator=generator_for(7, "score", 2)))
