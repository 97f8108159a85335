"""Wrappers that do the right thing in a way of their own: the suite must find nothing in them.

Each takes one liberty that no requirement forbids and that a real wrapper might take. An alarm of a
check about one of them is an error of the check. Not for training: nothing here overlaps or is
fast.
"""

from collections.abc import Mapping

from conformance.adapters.odd.by_hand import ByHand
from conformance.adapters.odd.conventions import (
    BuffersOfRankZero,
    LossScaledBeforeASum,
    SummedGradients,
    ZeroForUnused,
)
from conformance.adapters.odd.interleaved import InterleavedShards
from conformance.adapters.odd.outside import (
    ExtraPrefix,
    OptimizerBehindAProxy,
    OtherKeyOrder,
    OwnFlatBuffer,
)
from conformance.adapters.odd.reductions import (
    FinishedInTheStep,
    GatheredAndSummed,
    HarmlessCollectives,
    ReversedBuckets,
    TwoHalves,
)

ODD: Mapping[str, type[ByHand]] = {
    f"{each.__module__}:{each.__name__}": each
    for each in (
        ByHand,
        ReversedBuckets,
        TwoHalves,
        GatheredAndSummed,
        HarmlessCollectives,
        FinishedInTheStep,
        OptimizerBehindAProxy,
        OtherKeyOrder,
        OwnFlatBuffer,
        ExtraPrefix,
        SummedGradients,
        LossScaledBeforeASum,
        ZeroForUnused,
        BuffersOfRankZero,
        InterleavedShards,
    )
}
"""By the name under which the suite takes each."""

__all__ = ["ODD", "ByHand"]
