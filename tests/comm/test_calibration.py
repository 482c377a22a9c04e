"""alpha and beta of a link, measured through the operations that averaging uses."""

import pytest

from hpctrain.comm.link import LinkModel, calibrate
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("link", [LinkModel(50e-6, 8e-9), LinkModel(2e-6, 1e-10), LinkModel(0.0, 1e-9)])
def test_a_modelled_link_is_found_again_on_every_rank(ranks: int, link: LinkModel) -> None:
    def program(comm: ThreadCommunicator) -> LinkModel:
        return calibrate(comm, virtual_engine(comm))

    results = run_virtual(ranks, program, link=link)
    assert len(set(results)) == 1
    assert results[0].alpha_seconds == pytest.approx(link.alpha_seconds, rel=1e-6, abs=1e-12)
    assert results[0].beta_seconds_per_byte == pytest.approx(link.beta_seconds_per_byte, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_link_that_takes_no_time_has_no_cost(ranks: int) -> None:
    assert set(run_virtual(ranks, lambda comm: calibrate(comm, virtual_engine(comm)))) == {LinkModel(0.0, 0.0)}
