"""Every rank raises alike, over real ranks."""

import pytest

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.errors import DataError


@pytest.mark.parallel([1, 2, 3, 4])
def test_one_ranks_error_is_everyones(world: Communicator) -> None:
    for failing in range(world.size):

        def work(failing: int = failing) -> int:
            if world.rank == failing:
                raise DataError(f"file {failing} is missing")
            return world.rank

        with pytest.raises(DataError, match=f"^file {failing} is missing") as caught:
            raise_on_all_ranks(world, work)
        assert (f"(on rank {failing} of {world.size})" in str(caught.value)) == (world.size > 1)
    assert raise_on_all_ranks(world, lambda: world.rank) == world.rank
