import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "needs", "extra"),
    [
        ("lightning", "lightning.pytorch", "lightning"),
        ("huggingface", "transformers", "transformers"),
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_what_is_not_installed_is_named(module, needs, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"driveprune.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'driveprune\[{extra}\]'"):
        importlib.import_module(f"driveprune.integrations.{module}")
