"""The rules of restarts, and the pulse by which a rank and its keeper measure how long the other has been stopped."""

import json
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

import pytest

from hpctrain.launch.keeper import Pulse
from hpctrain.launch.supervisor import Attempt, AttemptOutcome, RestartPolicy, Supervisor, TrainCommand, summary

_WORDS = ["srun", "-n", "2", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml"]
_NOTHING = AttemptOutcome()


def _wrote(step: int, node: str = "") -> AttemptOutcome:
    run = Path("runs/a-1")
    return AttemptOutcome(run, run / f"checkpoint-{step:08d}.h5", step + 2, "Rank 1 was ended by SIGKILL.", node)


class _Runner:
    """Ends each attempt with the next code; a code may be a signal: then somebody has asked for the end with it, code 85."""

    def __init__(self, codes: Sequence[int | Signals], asked_in_pause: int = 0) -> None:
        self.request: Signals | None = None
        self.ran: list[tuple[str, ...]] = []
        self.pauses: list[float] = []
        self._codes, self._asked_in_pause = iter(codes), asked_in_pause

    def run(self, words: Sequence[str]) -> int:
        self.ran.append(tuple(words))
        code = next(self._codes)
        if isinstance(code, Signals):
            self.request, code = code, 85
        return code

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self._asked_in_pause:
            self.request = Signals.SIGTERM


def _run(
    runner: _Runner, traces: Sequence[AttemptOutcome], restarts: int = 3, **options: bool
) -> tuple[int, list[Attempt], list[str]]:
    left, kept, said = iter(traces), [], []
    rules = RestartPolicy(restarts, 5.0, **options)
    command = TrainCommand.find(_WORDS)
    supervisor = Supervisor(command, rules, runner, look=lambda: next(left), keep=kept.append, say=said.append)
    code = supervisor.run()
    assert supervisor.attempts == kept
    return code, kept, said


@pytest.mark.parametrize(("code", "words"), [(0, "done"), (85, "stopped with a checkpoint"), (2, "would fail the same way")])
def test_what_ends_well_or_would_fail_alike_is_not_started_again(code: int, words: str) -> None:
    ended, attempts, said = _run(_Runner([code]), [_wrote(4)])
    assert (ended, len(attempts)) == (code, 1)
    assert words in said[0]


def test_failures_in_a_row_are_counted_and_pauses_grow() -> None:
    runner = _Runner([9] * 9)
    code, attempts, said = _run(runner, [_NOTHING] * 9, restarts=8)
    assert (code, len(attempts)) == (9, 9)
    assert runner.pauses == [5, 10, 20, 40, 80, 160, 300, 300]
    assert "given up after 9 failures without a new checkpoint" in said[-1]
    assert set(runner.ran) == {tuple(_WORDS)}, "without a checkpoint the command is repeated as it was given"


def test_without_restarts_a_failure_is_the_end() -> None:
    runner = _Runner([1])
    assert (_run(runner, [_wrote(3)], restarts=0)[0], runner.pauses) == (1, [])


def test_a_new_checkpoint_lets_the_count_begin_again() -> None:
    runner = _Runner([9, 9, 139, 9, 0])
    code, attempts, _ = _run(runner, [_NOTHING, _NOTHING, _wrote(4), _NOTHING, _wrote(9)], restarts=2)
    assert (code, len(attempts)) == (0, 5)
    assert runner.pauses == [5, 10, 5, 10]
    resumed = TrainCommand.find(_WORDS).resumed(Path("runs/a-1")).words
    assert runner.ran == [tuple(_WORDS)] * 3 + [resumed] * 2


def test_with_requeue_a_time_limit_is_no_end() -> None:
    runner = _Runner([85, 85, 0])
    assert (_run(runner, [_wrote(4), _wrote(8), _wrote(9)], restarts=0, requeue=True)[0], runner.pauses) == (0, [0, 0])


def test_a_stop_without_progress_counts_as_a_failure() -> None:
    """Else it would be started again for ever."""
    assert len(_run(_Runner([85] * 3), [_NOTHING] * 3, restarts=2, requeue=True)[1]) == 3


def test_a_request_to_end_is_obeyed() -> None:
    code, attempts, said = _run(_Runner([Signals.SIGINT]), [_wrote(4)], requeue=True)
    assert (code, len(attempts)) == (85, 1)
    assert "stopped by SIGINT" in said[0]


@pytest.mark.parametrize(("traces", "code"), [(_wrote(4), 85), (_NOTHING, 143)])
def test_a_request_in_a_pause_ends_the_run(traces: AttemptOutcome, code: int) -> None:
    """With a checkpoint there is something to go on from, as 85 promises."""
    runner = _Runner([9], asked_in_pause=1)
    assert _run(runner, [traces])[0] == code


def test_a_node_that_failed_twice_is_left_out() -> None:
    runner = _Runner([9, 9, 9, 0])
    traces = [_wrote(4, "n3"), _wrote(6, "n5"), _wrote(8, "n3"), _wrote(9)]
    _, attempts, said = _run(runner, traces, excludes=True)
    assert [attempt.excluded for attempt in attempts] == [(), (), (), ("n3",)]
    assert [words[1] for words in runner.ran] == ["-n", "-n", "-n", "--exclude=n3"]
    assert "restarts in 5 s without n3 from the newest checkpoint of runs/a-1" in said[2]


def test_nodes_stay_where_they_cannot_be_left_out() -> None:
    runner = _Runner([9, 9, 0])
    _run(runner, [_wrote(4, "n3"), _wrote(6, "n3"), _wrote(9)])
    assert [words[1] for words in runner.ran] == ["-n", "-n", "-n"]


def test_all_attempts_are_reported() -> None:
    _, attempts, _ = _run(_Runner([9, 0]), [_wrote(4, "n3"), _NOTHING])
    first, second = summary(attempts)
    assert first.startswith("attempt 1: 2")
    assert first.endswith("exit code 9, reached step 6; Rank 1 was ended by SIGKILL.")
    assert second.endswith("exit code 0, reached no step")
    record = json.loads(json.dumps(attempts[0].as_json()))
    assert (record["attempt"], record["code"], record["step"], record["node"]) == (1, 9, 6, "n3")
    assert record["checkpoint"] == "runs/a-1/checkpoint-00000004.h5"


def _looks(pulse: Pulse, count: int) -> list[bool]:
    return [pulse.look(1.0) for _ in range(count)]


def test_an_unwatched_one_may_stand_still() -> None:
    pulse = Pulse()
    assert not any(_looks(pulse, 100))
    pulse.watch(3.0)
    pulse.rest()
    assert not any(_looks(pulse, 100))


def test_one_that_beats_lives() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    for _ in range(20):
        assert not any(_looks(pulse, 3))
        pulse.beat()


def test_one_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert _looks(pulse, 5) == [False, False, False, True, True]  # the first look sees that it is watched


def test_a_keeper_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert not any(pulse.look_at_keeper(1.0) for _ in range(100))  # there is none
    pulse.keep()
    assert [pulse.look_at_keeper(1.0) for _ in range(5)] == [False, False, False, True, True]
    pulse.keep()
    assert not pulse.look_at_keeper(1.0)
