"""Alternatives that are timed in turns: who is called when, and which seconds count."""

from __future__ import annotations

import time

from executors.turns import Took, TurnTimes, end_to_end, in_turns, turn_table


class Clock:
    """Stands still but for what a way takes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def way(self, took_s):
        def run(number: int) -> None:
            self.now_s += took_s(number)

        return run


def test_only_the_last_call_of_a_turn_and_the_rounds_after_the_first_count():
    clock = Clock()
    # Cold calls take a hundred times as long, those of the first round a thousand times.
    ways = {
        name: clock.way(lambda n, own=own: own * (1000 if n < 2 else 100 if n % 2 == 0 else n))
        for name, own in (("fast", 1.0), ("slow", 2.0))
    }
    times = in_turns(ways, 3, num_untimed=1, clock=clock)
    assert times == {"fast": TurnTimes((3.0, 5.0, 7.0)), "slow": TurnTimes((6.0, 10.0, 14.0))}
    assert (times["slow"].median_s, times["slow"].fastest_s) == (10.0, 6.0)


def test_ways_take_turns_within_every_round():
    calls: list[tuple[str, int]] = []
    ways = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    in_turns(ways, 1, num_untimed=1)
    assert calls == [(name, turn * 2 + k) for turn in (0, 1) for name in "ab" for k in (0, 1)]


def test_what_a_way_only_began_is_waited_for_before_and_after():
    clock, pending = Clock(), [0.0]

    def launch(_: int) -> None:
        pending[0] += 2.0

    def finish() -> None:
        clock.now_s += pending[0]
        pending[0] = 0.0

    times = in_turns({"kernel": launch}, 2, num_untimed=1, clock=clock, finish=finish)
    assert times["kernel"].seconds == (2.0, 2.0)


def test_seconds_that_another_process_took_are_taken_from_it():
    clock = Clock()
    times = in_turns({"there": lambda _: Took(0.5)}, 2, clock=clock)
    assert times["there"].seconds == (0.5, 0.5)


def test_steps_are_timed_from_the_end_of_the_one_before(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    took_s = iter((3.0, 1.0, 2.0))

    def step() -> None:
        clock.now_s += next(took_s)

    assert end_to_end(step, 3) == (3.0, 1.0, 2.0)


def test_a_table_has_numbers_beside_the_times():
    times = {"a": TurnTimes((0.001, 0.003, 0.002)), "b": TurnTimes((0.004,))}
    table = turn_table(times, {"/ a": lambda own: own.median_s / times["a"].median_s})
    assert table.rows == [("a", "2.0", "1.0", "1.00"), ("b", "4.0", "4.0", "2.00")]
