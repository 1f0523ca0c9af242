import pytest
import torch

from pagedray.kernels import reference
from pagedray.kernels.cpu import launch, library


class Operations(dict):
    """A backend's operations as attributes; the reference's where it has none of its own."""

    def __getattr__(self, name):
        return self[name] if name in self else getattr(reference, name)


def operations_of(tier):
    if tier not in library.available_tiers():
        pytest.skip(f"this CPU has no {tier}")
    loaded = library.load(tier)
    assert loaded is not None, "the native library does not build here"
    return Operations(launch.operations(loaded))


@pytest.fixture(scope="session", params=library.TIERS)
def native(request):
    """The native operations, once for each tier this CPU can run."""
    return operations_of(request.param)


@pytest.fixture(scope="session", params=["reference", *library.TIERS])
def backend(request):
    """The oracle, then each tier: for tests that judge both by something else."""
    return Operations() if request.param == "reference" else operations_of(request.param)


@pytest.fixture
def threads(request):
    """How many threads the kernels use; tests ask for others with an indirect parameter."""
    before = torch.get_num_threads()
    number = getattr(request, "param", 1)
    torch.set_num_threads(number)
    yield number
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _few_threads(threads):
    """One thread where a test does not say otherwise: many small regions of several are slow on a busy machine."""
