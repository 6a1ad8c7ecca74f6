import os
import shutil
import tempfile

import pytest

from jurybox.protocol.segment import directory


@pytest.fixture(scope="session", autouse=True)
def shared_memory_of_our_own():
    """A folder in shared memory for this run alone: what is left in it is ours, and nobody else's is swept."""
    folder = tempfile.mkdtemp(prefix="jurybox-tests-", dir=directory())
    before = os.environ.get("JURYBOX_SHM_DIR")
    os.environ["JURYBOX_SHM_DIR"] = folder
    yield folder
    if before is None:
        del os.environ["JURYBOX_SHM_DIR"]
    else:
        os.environ["JURYBOX_SHM_DIR"] = before
    shutil.rmtree(folder)
