"""One choice of convolutions' plans for all ranks: the fastest on the first rank's device."""

from __future__ import annotations

from hpctrain.backend.cuda.device import TimedPlans
from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks


def agree(world: Communicator, device: object) -> dict[str, str]:
    """Have rank 0 time the plans of all convolutions that were asked for so far, and all ranks use what it takes. Collective.

    Times differ a little from rank to rank, and plans may round in different ways: ranks that chose by themselves would hold
    different gradients of the same images, and two runs of the same job different ones still. Gives the choices, to be recorded;
    none, and nothing is sent, where `device` has no plans to choose from. Ranks with devices of that kind all call it, or none.

    Raises:
        BackendError: a rank's device does not have a plan that rank 0's has taken.
    """
    if not isinstance(device, TimedPlans):
        return {}

    def choose() -> dict[str, str]:
        if world.rank:
            return {}
        device.time_plans()
        return device.plan_choices()

    choices: dict[str, str] = world.broadcast_object(raise_on_all_ranks(world, choose))
    raise_on_all_ranks(world, lambda: device.take_plan_choices(choices))
    return choices
