import pytest
import torch
from hypothesis import settings

settings.register_profile("clowder", max_examples=15, deadline=None, derandomize=True, database=None)
settings.load_profile("clowder")


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)
