"""What predictions tell follows from the simulated step."""

from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.planner.prediction import Prediction, SimulationOptions
from hpctrain.planner.simulation.simulate import simulate
from tests.support.simulated import link, machine, program, sharded, tasks


def test_exposed_seconds_are_the_tables_total() -> None:
    step = simulate(program([(2, tasks((0.1,)))], (1000,), sharded((1000,), 2)), machine(link(0.1, 1e-3)))
    prediction = Prediction(step, memory_bytes=1, exchanged_bytes=2, measured_share=0.5)
    assert (
        prediction.step.exposed_seconds == step.table.total.exposed_seconds == sum(row.exposed_seconds for row in step.table.rows)
    )
    assert prediction.step.exposed_seconds > 0


def test_by_default_nothing_is_drawn_and_messages_move_between_operators() -> None:
    options = SimulationOptions()
    assert (options.progress, options.slow, options.jitter) == (ProgressMode.TEST, {}, 0.0)
    assert options.steps > 1  # the first one has nothing to wait for
