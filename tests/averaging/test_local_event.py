"""Operations wait for local events, which happen on this rank alone."""

from hpctrain.averaging.local_event import LocalEvent
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import Complete, SingleCommunicator


def test_an_operation_and_all_behind_it_start_once_the_event_has_happened() -> None:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)
    queue = engine.queue(comm)
    started: list[str] = []

    def start(name: str) -> Complete:
        started.append(name)
        return Complete()

    event = LocalEvent("gradient of a")
    first = queue.post(lambda: start("a"), "a", [event])
    second = queue.post(lambda: start("b"), "b")
    engine.poll()
    assert started == []
    assert "gradient of a" in str(first)
    event.happen()
    assert started == []  # nothing starts but in a poll
    engine.wait(second)
    assert started == ["a", "b"]
    assert first.done
