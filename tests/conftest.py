from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import driveprune

settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


def pytest_configure():
    """Forget loops compiled before the last change: numba looks only at the file of the outermost one."""
    home = Path(driveprune.__file__).parent
    changed = max(path.stat().st_mtime for path in home.rglob("*.py"))
    for kept in home.rglob("*.nb[ic]"):
        with suppress(FileNotFoundError):  # another process may be faster
            if kept.stat().st_mtime < changed:
                kept.unlink()


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run side by side, each on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
