"""The closed list of reasons a check can give, with the sentence fragment each one prints.

Recognising a cause from numbers is `conformance.explain`'s work; this module only names them.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why an observation differs from the oracle's. Members are never renamed."""

    SUMMED_NOT_AVERAGED = "summed-not-averaged"
    DIVIDED_TWICE = "divided-twice"
    SCALED = "scaled"
    LAST_MICRO_BATCH_ONLY = "last-micro-batch-only"
    UNEQUAL_WEIGHTS = "unequal-weights"
    NOT_REDUCED = "not-reduced"
    STALE = "stale"
    OFF_BY_ONE_SHARD = "off-by-one-shard"
    CUT_FOR_OTHER_RANKS = "cut-for-other-ranks"
    PERMUTED = "permuted"
    LAST_ROWS = "last-rows"
    ZERO = "zero"
    SIGN = "sign"
    OTHER_RANK = "other-rank"
    RANKS_DIFFER = "ranks-differ"
    DTYPE_ROUND_TRIP = "dtype-round-trip"
    WRONG_DTYPE = "wrong-dtype"
    WRONG_SHAPE = "wrong-shape"
    WRONG_STRIDES = "wrong-strides"
    WRONG_COUNT = "wrong-count"
    WRONG_DEVICE = "wrong-device"
    UNTIED = "untied"
    FROZEN_CHANGED = "frozen-changed"
    MISSING_GRADIENT = "missing-gradient"
    UNEXPECTED_GRADIENT = "unexpected-gradient"
    MISSING_KEY = "missing-key"
    UNEXPECTED_KEY = "unexpected-key"
    WRONG_STEP_COUNT = "wrong-step-count"
    WRONG_HYPERPARAMETER = "wrong-hyperparameter"
    LOCAL_NORM = "local-norm"
    COUNTED_TWICE = "counted-twice"
    PADDING_COUNTED = "padding-counted"
    OTHER_NORM = "other-norm"
    NOT_CLIPPED = "not-clipped"
    NOT_UNSCALED = "not-unscaled"
    NOT_LOADED = "not-loaded"
    ALIASED = "aliased"
    NOT_DROPPED = "not-dropped"
    CONVENTION_BROKEN = "convention-broken"
    REDUCED_IN_NO_SYNC = "reduced-in-no-sync"
    REDUCED_REPEATEDLY = "reduced-repeatedly"
    GATHERED_REPEATEDLY = "gathered-repeatedly"
    NOT_SCATTERED = "not-scattered"
    OTHER_COLLECTIVE = "other-collective"
    NOT_SHARDED = "not-sharded"
    NOT_FREED = "not-freed"
    NOT_RESTORED = "not-restored"
    NOT_REPEATED = "not-repeated"
    CHANGED_BY_EVAL = "changed-by-eval"
    NON_FINITE = "non-finite"
    EXCEPTION = "exception"
    CRASHED = "crashed"
    HUNG = "hung"
    DESYNCHRONISED = "desynchronised"
    FOLLOWS = "follows"
    UNEXPLAINED = "unexplained"


MEANING: dict[Cause, str] = {
    Cause.SUMMED_NOT_AVERAGED: "summed over ranks, not averaged",
    Cause.DIVIDED_TWICE: "divided once too often",
    Cause.SCALED: "right direction, wrong factor",
    Cause.LAST_MICRO_BATCH_ONLY: "holds the last micro-batch only",
    Cause.UNEQUAL_WEIGHTS: "ranks or micro-batches do not all weigh the same",
    Cause.NOT_REDUCED: "this rank's own value, not reduced",
    Cause.STALE: "the value of an earlier step, or made from one",
    Cause.OFF_BY_ONE_SHARD: "rows shifted by one",
    Cause.CUT_FOR_OTHER_RANKS: "cut as for another number of ranks",
    Cause.PERMUTED: "right values in the wrong places",
    Cause.LAST_ROWS: "only the last rows are wrong, as where padding is miscounted",
    Cause.ZERO: "zero",
    Cause.SIGN: "the sign is flipped",
    Cause.OTHER_RANK: "another rank's value",
    Cause.RANKS_DIFFER: "the ranks disagree",
    Cause.DTYPE_ROUND_TRIP: "rounded through a shorter dtype",
    Cause.WRONG_DTYPE: "wrong dtype",
    Cause.WRONG_SHAPE: "wrong shape",
    Cause.WRONG_STRIDES: "another memory format",
    Cause.WRONG_COUNT: "ran another number of times",
    Cause.WRONG_DEVICE: "wrong device",
    Cause.UNTIED: "tied parameters became two",
    Cause.FROZEN_CHANGED: "a frozen parameter changed",
    Cause.MISSING_GRADIENT: "no gradient where one is due",
    Cause.UNEXPECTED_GRADIENT: "a gradient where none is due",
    Cause.MISSING_KEY: "a key is missing",
    Cause.UNEXPECTED_KEY: "a key too many",
    Cause.WRONG_STEP_COUNT: "wrong optimizer step count",
    Cause.WRONG_HYPERPARAMETER: "wrong optimizer hyper-parameter",
    Cause.LOCAL_NORM: "the norm of one rank's part only",
    Cause.COUNTED_TWICE: "parts counted more than once",
    Cause.PADDING_COUNTED: "elements of padding counted as if they were of a parameter",
    Cause.OTHER_NORM: "the norm with another p",
    Cause.NOT_CLIPPED: "the norm is right but the gradients were not clipped",
    Cause.NOT_UNSCALED: "made with gradients that are still multiplied by the loss scale",
    Cause.NOT_LOADED: "still the value from before the load",
    Cause.NOT_DROPPED: "gradients that were dropped are part of it",
    Cause.ALIASED: "what was saved followed the training after it",
    Cause.CONVENTION_BROKEN: "the convention is not kept",
    Cause.REDUCED_IN_NO_SYNC: "gradients reduced inside no_sync",
    Cause.REDUCED_REPEATEDLY: "gradients reduced more than once per group",
    Cause.GATHERED_REPEATEDLY: "parameters gathered more often than the strategy needs",
    Cause.NOT_SCATTERED: "every rank gets the whole gradient, not its part",
    Cause.OTHER_COLLECTIVE: "ranks issued different collectives",
    Cause.NOT_SHARDED: "every rank holds everything",
    Cause.NOT_FREED: "memory is not given back",
    Cause.NOT_RESTORED: "a mode, random number or global state is not put back",
    Cause.NOT_REPEATED: "another value than the same training had before",
    Cause.CHANGED_BY_EVAL: "an evaluation pass changed the training state",
    Cause.NON_FINITE: "not a finite number",
    Cause.EXCEPTION: "an exception",
    Cause.CRASHED: "a rank died",
    Cause.HUNG: "a rank never came",
    Cause.DESYNCHRONISED: "the ranks entered different collectives",
    Cause.FOLLOWS: "follows from what went wrong before it",
    Cause.UNEXPLAINED: "like no known defect",
}

DESCRIBES = frozenset({Cause.SCALED, Cause.LAST_ROWS, Cause.UNEXPLAINED})
"""Causes that tell how a number looks, and of no defect that would have made it."""

OF_FORM = frozenset(
    {
        Cause.MISSING_KEY,
        Cause.UNEXPECTED_KEY,
        Cause.WRONG_SHAPE,
        Cause.WRONG_STRIDES,
        Cause.WRONG_DEVICE,
        Cause.WRONG_COUNT,
        Cause.NOT_RESTORED,
        Cause.NOT_SHARDED,
        Cause.NOT_FREED,
    }
)
"""Causes of how a thing is kept, named or called: no number that comes later follows from them.

A wrong dtype is none of them: what it rounds spreads as a wrong value does.
"""
