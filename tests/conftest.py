import pytest
import torch
from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run side by side, each on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
