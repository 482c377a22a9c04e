"""Predictions of a step: its time by simulation, its memory and its bytes in integers."""

from __future__ import annotations

from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import Prediction, SimulationOptions
from hpctrain.planner.simulation.simulate_rest import simulate
from hpctrain.planner.step_bytes import exchanged_bytes
from hpctrain.planner.step_program import step_program

_USUAL = SimulationOptions()


def predict(
    job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts, options: SimulationOptions = _USUAL
) -> Prediction:
    """The simulated step of a candidate, the memory of the rank that needs most, and the bytes that all ranks exchange.

    Raises:
        HpctrainError: what a run would refuse.
    """
    program = step_program(job, candidate, machine, costs)
    step = simulate(program, machine, options)
    memory = max(of_class.memory_bytes for of_class in program.classes)
    return Prediction(step, memory, exchanged_bytes(program), costs.measured_share())
