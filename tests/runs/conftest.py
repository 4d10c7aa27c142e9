from pathlib import Path

import pytest

from tests.runs.kills import Server


@pytest.fixture(scope="module")
def server():
    """A process that does runs in processes that can be killed."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The folder of a run that was never killed."""
    root = tmp_path_factory.mktemp("whole")

    def folder(spec) -> Path:
        assert server.run(root, spec, every=1e9)["code"] == 0
        return root / spec.id

    return folder
