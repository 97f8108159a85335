"""The verdict as a pure function: literal records, reports and exits, no processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.ranks import CollectiveRecord, RankReport, RankStatus, RankVerdict
from conformance.ranks.diagnose import Diagnosis, RankTrace, diagnose, streams_agree

REDUCE = CollectiveRecord(
    index=0,
    op="all_reduce",
    group="dp",
    group_ranks=(0, 1),
    stream="dp",
    nth=1,
    numel=8,
    shapes=((2, 4),),
    dtype="float32",
    bytes=32,
    reduce_op="sum",
    entered=100.0,
)
GATHER = replace(REDUCE, op="all_gather", reduce_op=None, nth=7, index=6, module="layers.3")


def report(status: str = "OK", *, streams: dict[str, int] | None = None, **rest: Any) -> RankReport:
    ends = {name: (count, 0, (0, 1)) for name, count in (streams or {}).items()}
    return RankReport(status=RankStatus(status), streams=ends, **rest)


def failure(error: str, *, ended: float = 1.0) -> RankReport:
    return report("ERROR", error=error, message="because\nmore", ended=ended)


def judge(*traces: RankTrace) -> Diagnosis:
    return diagnose(traces, now=112.1, timeout=60.0)


def trace(rank: int, *records: CollectiveRecord, **rest: Any) -> RankTrace:
    return RankTrace(rank=rank, records=records, **rest)


def test_equal_collectives_and_values_are_ok() -> None:
    done = report(streams={"dp": 1})
    assert judge(trace(0, REDUCE, report=done), trace(1, REDUCE, report=done)) == Diagnosis(
        verdict=RankVerdict.OK
    )


def test_missing_collective_names_the_absent_rank_and_who_waits() -> None:
    found = judge(trace(0, GATHER), trace(1))
    assert found == Diagnosis(
        verdict=RankVerdict.HANG,
        sentence="rank 1 never entered all_gather 7 of group dp (layers.3); "
        "rank 0 waits there for 12.1 s; rank 1 is, outside of every collective",
    )


def test_the_earliest_missing_collective_is_named() -> None:
    later = replace(GATHER, nth=8, index=7, entered=101.0)
    found = judge(trace(0, GATHER, later), trace(1))
    assert found.sentence.startswith("rank 1 never entered all_gather 7 ")


def test_ranks_that_wait_for_each_other_in_two_groups_hang() -> None:
    other = replace(REDUCE, group="tp", stream="tp", entered=101.0)
    found = judge(trace(0, REDUCE), trace(1, other))
    assert found.verdict is RankVerdict.HANG
    assert found.sentence == (
        "rank 1 never entered all_reduce 1 of group dp; rank 0 waits there for 12.1 s; "
        "rank 1 entered all_reduce 1 of group tp 11.1 s ago, its last"
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"op": "broadcast", "reduce_op": None, "root": 0}, "op"),
        ({"numel": 9}, "numel"),
        ({"dtype": "float64"}, "dtype"),
        ({"reduce_op": "max"}, "reduce_op"),
        ({"root": 1}, "root"),
    ],
)
@pytest.mark.parametrize("symptom", ["returned", "waiting", "failed", "died"])
def test_different_collectives_are_a_desync_whatever_the_symptom(
    change: dict[str, Any], what: str, symptom: str
) -> None:
    rest: dict[str, Any] = {
        "returned": {"report": report()},
        "waiting": {},
        "failed": {"report": failure("RuntimeError")},
        "died": {"exit": "signal SIGABRT"},
    }[symptom]
    found = judge(trace(0, REDUCE), trace(1, replace(REDUCE, **change), **rest))
    assert found.verdict is RankVerdict.DESYNC
    assert found.sentence.endswith(f": different {what}")


def test_another_shape_of_the_same_size_is_no_desync() -> None:
    done = report(streams={"dp": 1})
    flat = replace(REDUCE, shapes=((8,),))
    found = judge(trace(0, REDUCE, report=done), trace(1, flat, report=done))
    assert found.verdict is RankVerdict.OK


def test_uneven_all_to_all_is_no_desync() -> None:
    done = report(streams={"dp": 1})
    mine = replace(REDUCE, op="all_to_all", reduce_op=None)
    found = judge(trace(0, mine, report=done), trace(1, replace(mine, numel=3), report=done))
    assert found.verdict is RankVerdict.OK


def test_groups_of_one_name_with_other_members_are_not_compared() -> None:
    row = replace(REDUCE, group_ranks=(0,))
    other_row = replace(REDUCE, group_ranks=(1,), numel=3)
    found = judge(trace(0, row, report=report()), trace(1, other_row, report=report()))
    assert found.verdict is RankVerdict.OK


def test_a_crash_explains_the_partner_that_waits() -> None:
    found = judge(trace(0, REDUCE), trace(1, exit="signal SIGKILL"))
    assert found == Diagnosis(
        verdict=RankVerdict.CRASH,
        sentence="rank 1 died without a report (signal SIGKILL); "
        "rank 0 entered all_reduce 1 of group dp 12.1 s ago, its last",
    )


def test_a_crash_explains_the_partner_that_lost_its_connection() -> None:
    lost = failure("RuntimeError", ended=0.5)
    found = judge(trace(0, REDUCE, report=lost), trace(1, REDUCE, exit="exit 0"))
    assert found.verdict is RankVerdict.CRASH
    assert found.sentence.startswith("rank 1 died without a report (exit 0), its last collective")


def test_an_abort_after_waiting_in_vain_is_the_hang_of_the_absent_rank() -> None:
    found = judge(trace(0, REDUCE, exit="signal SIGABRT"), trace(1))
    assert found.verdict is RankVerdict.HANG
    assert found.sentence.startswith("rank 1 never entered all_reduce 1 of group dp; rank 1 is")
    assert found.sentence.endswith("rank 0 gave up: signal SIGABRT")


def test_an_unreadable_report_is_a_crash() -> None:
    found = judge(trace(0, report=report()), trace(1, fault="sent a report that cannot be read"))
    assert found == Diagnosis(
        verdict=RankVerdict.CRASH, sentence="rank 1 sent a report that cannot be read"
    )


def test_an_exception_wins_over_the_partner_that_waits() -> None:
    found = judge(trace(0, REDUCE), trace(1, report=failure("ValueError")))
    assert found.verdict is RankVerdict.ERROR
    assert found.sentence == (
        "rank 1: ValueError: because; rank 0 entered all_reduce 1 of group dp 12.1 s ago, its last"
    )


def test_equal_exceptions_are_told_once_and_the_first_in_time_first() -> None:
    late, early = failure("ValueError", ended=9.0), failure("KeyError", ended=5.0)
    found = judge(*(trace(r, report=x) for r, x in enumerate([late, early, late])))
    assert found.sentence == "rank 1: KeyError: because; ranks 0, 2: ValueError: because"


def test_a_skip_on_all_ranks_is_a_skip_and_on_some_an_error() -> None:
    skip = report("SKIP", error="SkipRank", message="no device")
    everywhere = judge(trace(0, report=skip), trace(1, report=skip))
    assert everywhere == Diagnosis(verdict=RankVerdict.SKIP, sentence="no device")
    partly = judge(trace(0, report=report()), trace(1, report=skip))
    assert partly == Diagnosis(
        verdict=RankVerdict.ERROR, sentence="rank 1 skipped (no device), rank 0 did not"
    )


def test_a_collective_beyond_the_ring_counts_from_the_report() -> None:
    far = replace(REDUCE, nth=300, index=299)
    done = report(streams={"dp": 300})
    assert judge(trace(0, far, report=done), trace(1, far, report=done)).verdict is RankVerdict.OK


def test_no_rank_is_accused_of_what_its_overwritten_records_cannot_tell() -> None:
    elsewhere = replace(REDUCE, stream="tp", group="tp", index=500, nth=500, group_ranks=(1,))
    found = judge(trace(0, REDUCE), trace(1, elsewhere))
    assert found.verdict is RankVerdict.HANG
    assert found.sentence.startswith("rank 0 did not end within 60 s, its last collective was")


def test_checksums_tell_what_the_records_do_not() -> None:
    one = RankReport(status=RankStatus.OK, streams={"dp": (9, 1234, (0, 1))})
    other = RankReport(status=RankStatus.OK, streams={"dp": (9, 5678, (0, 1))})
    assert streams_agree([one, one])
    assert not streams_agree([one, other])
    assert not streams_agree([one, None])
    found = judge(trace(0, report=one), trace(1, report=other))
    assert found.verdict is RankVerdict.DESYNC
    assert "entered 9 collectives each in dp" in found.sentence
