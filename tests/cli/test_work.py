"""Which cases a selection means: laws of the plan, on the built-in adapters. No ranks."""

from __future__ import annotations

from itertools import chain, product

import pytest

from conformance.adapter import state_claims
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.checks.registry import TRAINING
from conformance.errors import UsageError
from conformance.models import cases
from conformance.names import CAPABILITIES, Depth
from conformance.optimizers import OPTIMIZERS, WHOLE_TENSOR
from conformance.plan import (
    SHOWN_BY,
    every_case,
    plan,
    plan_probes,
    unclaimed,
)
from conformance.report.lines import Role
from conformance.work import Selection, work_of

ALL = frozenset(CAPABILITIES)
NONE: frozenset[str] = frozenset()
DDP = "torch.DistributedDataParallel"


def planned(depth: Depth = Depth.WIDE, claims: frozenset[str] = ALL) -> list[Case]:
    return [
        p.case for p in plan(claims, list(CHECKS.values()), list(cases().values()), depth=depth)
    ]


def test_no_case_is_planned_twice() -> None:
    assert len(planned()) == len(set(planned()))


def test_a_narrower_plan_is_a_part_of_the_wider_one() -> None:
    narrow, wide, full = (set(planned(depth)) for depth in (Depth.NARROW, Depth.WIDE, Depth.FULL))
    assert narrow < wide < full


SMALL = [name for name, model in cases().items() if "wide" not in model.traits]


def test_every_small_model_is_trained_and_saved_at_every_depth() -> None:
    for depth in Depth:
        seen = {
            (case.model, "train" if case.scenario in TRAINING else case.scenario)
            for case in planned(depth)
        }
        saved = SMALL if depth is Depth.FULL else [m for m in SMALL if m != "routed"]
        assert {(m, "train") for m in SMALL} | {(m, "checkpoint") for m in saved} <= seen


@pytest.mark.parametrize("depth", Depth)
@pytest.mark.parametrize(
    "claims",
    [ALL, make_adapter(DDP)[0].capabilities, ALL - {c for c in ALL if "state" in c or c == "save"}],
    ids=["all", "of DDP", "no states"],
)
def test_each_model_meets_each_optimizer_and_each_number_of_micro_batches(
    claims: frozenset[str], depth: Depth
) -> None:
    judged = [c for c in planned(depth, claims) if c.scenario in (*TRAINING, "checkpoint")]
    trained = {c.model for c in judged} - {"routed"}  # which is run once, see `plan.NEEDED`
    assert trained >= set(SMALL) - {"routed", "varying", "unused"}
    for option, values in (("optimizer", {*OPTIMIZERS}), ("accumulation", {"1", "3"})):
        seen = {(c.model, c.option(option)) for c in judged}
        assert {(name, value) for name in trained for value in values} <= seen


@pytest.mark.parametrize("depth", Depth)
@pytest.mark.parametrize("kind", ["full", "sharded", "local", "save"])
def test_who_claims_one_kind_of_states_is_asked_for_it_with_every_model(
    kind: str, depth: Depth
) -> None:
    claims = frozenset(c for c in ALL if "state" not in c and c != "save") | {*state_claims(kind)}
    saved = {
        c.model: c.option("kind") for c in planned(depth, claims) if c.scenario == "checkpoint"
    }
    assert saved == dict.fromkeys((m for m in SMALL if m != "routed" or depth is Depth.FULL), kind)


def test_models_whose_states_have_parts_of_their_own_are_saved_in_each_form() -> None:
    forms: dict[str, set[str]] = {}
    for c in planned():
        if c.scenario == "checkpoint":
            forms.setdefault(c.model, set()).add(c.option("kind"))
    every = {"full", "sharded", "local", "save"}
    apart = {name for name, kinds in forms.items() if kinds == every}
    assert apart == {
        "mlp",
        "transformer",
        "batchnorm",
        "frozen",
        "tiny",
        "uneven",
        "unused",
        "strided",
    }
    assert all(kinds == {"sharded"} for name, kinds in forms.items() if name not in apart)


def test_full_depth_saves_every_small_model_in_every_way() -> None:
    saved = [c for c in planned(Depth.FULL) if c.scenario == "checkpoint"]
    ways = {(c.option("kind"), c.option("options")) for c in saved}
    assert len(ways) == 7  # three kinds by two options, and a directory
    assert len(saved) == len(ways) * len(SMALL)


def test_wide_models_are_there_for_live_bytes_and_for_nothing_else() -> None:
    for depth in Depth:
        memory = {c.model for c in planned(depth) if c.scenario == "memory"}
        assert memory == {c.model for c in planned(depth)} - set(SMALL) != set()


def test_only_who_says_when_gradients_are_there_is_evaluated_then() -> None:
    scenarios = {claims: {c.scenario for c in planned(claims=claims)} for claims in (ALL, NONE)}
    assert "eval_in_step" in scenarios[ALL]
    assert "eval_in_step" not in scenarios[NONE]


def test_what_the_first_forward_leaves_is_asked_in_both_modes_of_the_plain_model() -> None:
    modes = {(c.model, c.option("mode")) for c in planned() if c.scenario == "eval_first"}
    assert {mode for model, mode in modes if model == "mlp"} == {"", "inference"}
    assert {mode for model, mode in modes if model != "mlp"} == {""}


def test_every_check_judges_some_case_of_a_wrapper_that_claims_everything() -> None:
    judging = {
        check.id
        for p in plan(ALL, list(CHECKS.values()), list(cases().values()))
        for check in p.checks
    }
    assert set(CHECKS) - judging == {"run.completed"}


def test_a_case_of_an_unclaimed_capability_is_not_planned() -> None:
    kinds = {c.option("kind") for c in planned(claims=ALL - {"optim_state.sharded", "save"})}
    assert kinds == {"", "full", "local"}


def test_unclaimed_states_are_tried_out_together() -> None:
    missing = {"save", "model_state.local", "optim_state.local", "optim_state.full"}
    assert unclaimed(ALL - missing) == [
        ("optim_state.full",),
        ("save",),
        ("model_state.local", "optim_state.local"),
    ]


def test_a_probe_stays_on_the_plain_model_where_that_can_show_it() -> None:
    probes = plan_probes(ALL - {"save"}, list(CHECKS.values()), list(cases().values()))
    assert [(str(p.case), p.probe) for p in probes] == [("mlp/checkpoint/kind=save", ("save",))]


def test_what_is_claimed_is_not_probed() -> None:
    assert plan_probes(ALL, list(CHECKS.values()), list(cases().values())) == []


def test_the_control_comes_first_and_only_beside_other_adapters() -> None:
    roles = [item.role for item in work_of(Selection(adapters=("torch.fully_shard",))).items]
    assert roles[0] is Role.CONTROL
    assert roles.index(Role.JUDGED) == roles.count(Role.CONTROL)
    alone = work_of(Selection(adapters=(DDP,))).items
    assert Role.CONTROL not in {item.role for item in alone}


def test_several_patterns_of_variants_add_up() -> None:
    names = list(make_adapter(DDP)[0].variants)
    work = work_of(Selection(adapters=(DDP,), variants=(names[1], names[0])))
    assert [subject.variant for subject, _ in work.subjects] == names[:2]
    with pytest.raises(UsageError, match=r"no variant 'nope' of .*; known: "):
        work_of(Selection(adapters=(DDP,), variants=(names[0], "nope")))


def test_full_depth_crosses_every_variant_and_model_with_every_training() -> None:
    items = work_of(Selection(adapters=(DDP,), depth=Depth.FULL)).items
    crossed = {
        (item.subject.variant, case.model, case.option("optimizer"), case.option("accumulation"))
        for item in items
        if (case := item.planned.case).scenario in TRAINING and case.optimizer in OPTIMIZERS
    }
    options = {*product(make_adapter(DDP)[0].variants, SMALL, OPTIMIZERS, ("1", "3"))}
    # with a static graph what takes part may not vary
    fixed = {o for o in options if "static_graph" in o[0] and o[1] in ("varying", "routed")}
    assert crossed == options - fixed


def test_optimizers_of_whole_parameters_are_asked_of_who_claims_them() -> None:
    def asked(claims: frozenset[str]) -> set[str]:
        return {str(c) for c in planned(claims=claims) if c.optimizer in WHOLE_TENSOR}

    assert asked(ALL) == {f"mlp/train/optimizer={name}" for name in WHOLE_TENSOR}
    assert asked(ALL - {"optimizer.whole"}) == set()


@pytest.mark.parametrize("name", ["recomputed", "adapted", "scalar"])
def test_a_singular_model_takes_one_training_and_one_checkpoint(name: str) -> None:
    own = [c for c in planned() if c.model == name]
    kinds = [c.scenario for c in own if c.scenario in TRAINING | {"checkpoint"}]
    assert sorted(kinds) == ["checkpoint", "train"]


def test_what_takes_part_varies_from_step_to_step_and_from_micro_batch_to_micro_batch() -> None:
    own = [c for c in planned() if c.model == "varying"]
    assert {c.accumulation for c in own if c.scenario == "varying"} == {1, 3}
    assert sorted(c.scenario for c in own if c.scenario != "varying") == ["checkpoint"]


@pytest.mark.parametrize("depth", [Depth.NARROW, Depth.WIDE])
def test_a_model_of_which_ranks_use_other_parts_takes_one_training(depth: Depth) -> None:
    def own(claims: frozenset[str]) -> list[str]:
        return [str(c) for c in planned(depth, claims) if c.model == "routed"]

    assert own(ALL) == ["routed/varying/accumulation=1,optimizer=sgd"]
    assert own(ALL - {"unused_parameters.ranks"}) == []
    assert own(ALL - {"unused_parameters.varying"}) == []


def test_recipes_are_asked_of_the_models_that_show_something() -> None:
    seen = {(c.scenario, c.model) for c in planned() if c.scenario in SHOWN_BY}
    assert seen == {(scenario, name) for scenario, names in SHOWN_BY.items() for name in names}
    assert {name for names in SHOWN_BY.values() for name in names} <= set(SMALL)


def test_a_depth_is_that_of_every_variant() -> None:
    def cases_of(variant: str, depth: Depth | None) -> int:
        items = work_of(Selection(adapters=(DDP,), depth=depth)).items
        return len([i for i in items if i.role is Role.JUDGED and i.subject.variant == variant])

    first, other = list(make_adapter(DDP)[0].variants)[:2]
    assert cases_of(first, None) == cases_of(first, Depth.WIDE) > cases_of(first, Depth.NARROW)
    assert cases_of(other, None) == cases_of(other, Depth.NARROW) < cases_of(other, Depth.WIDE)


def controlled(*patterns: str, depth: Depth | None = None) -> list[str]:
    selection = Selection(adapters=("torch.fully_shard",), cases=patterns, depth=depth)
    return [str(i.planned.case) for i in work_of(selection).items if i.role is Role.CONTROL]


def test_the_control_of_a_run_of_one_plain_case_is_that_case() -> None:
    whole = controlled()
    assert len(whole) > 3
    assert {case.split("/")[:2] == ["mlp", "train"] for case in whole} == {True}
    for one in whole[-1], "transformer/train/accumulation=3,optimizer=sgd":
        assert controlled(one) == [one]
    crossed = "transformer/train/accumulation=3,optimizer=adamw"
    assert controlled(crossed, depth=Depth.FULL) == [crossed]


def test_the_control_of_chosen_cases_is_never_more_than_that_of_a_whole_run() -> None:
    assert controlled("*/train/*") == controlled("*") == controlled()
    assert controlled("mlp/train/*sgd") == [c for c in controlled() if c.endswith("sgd")]


def test_one_case_is_the_control_of_cases_that_are_not_plain() -> None:
    for pattern in ("mlp/checkpoint/*", "*/unused/*", "mlp/two_forwards"):
        assert controlled(pattern) == controlled()[:1]
    # a model without a plain case
    work = work_of(
        Selection(adapters=("torch.fully_shard",), models=("un*", "mlp"), cases=("unused/*",))
    )
    assert [str(i.planned.case) for i in work.items if i.role is Role.CONTROL] == controlled()[:1]


def test_cases_are_chosen_by_pattern_and_the_control_stays() -> None:
    items = work_of(Selection(adapters=("torch.fully_shard",), cases=("*/two_forwards",))).items
    chosen = {str(i.planned.case) for i in items if i.role is not Role.CONTROL}
    assert "mlp/two_forwards" in chosen
    assert {case.partition("/")[2] for case in chosen} == {"two_forwards"}
    assert Role.CONTROL in {item.role for item in items}


def test_scenarios_in_which_the_baseline_is_wrong_are_left_out() -> None:
    every = work_of(Selection(adapters=("torch.fully_shard",))).items
    fewer = work_of(Selection(adapters=("torch.fully_shard",)), without={"two_forwards"}).items
    left = [item for item in every if item.planned.case.scenario != "two_forwards"]
    assert list(fewer) == left != list(every)


def test_an_adapter_named_twice_is_judged_once() -> None:
    once = work_of(Selection(adapters=(DDP,)))
    assert work_of(Selection(adapters=(DDP, DDP))).items == once.items


def test_only_completion_can_be_asked_of_every_case() -> None:
    work = work_of(Selection(adapters=(DDP,), variants=("default",), checks=("run.completed",)))
    judged = {i.planned.case for i in work.items if i.role is Role.JUDGED}
    everything = work_of(Selection(adapters=(DDP,), variants=("default",)))
    assert judged >= {i.planned.case for i in everything.items if i.role is Role.JUDGED}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapters": ("torch.fuly_shard",)}, "did you mean torch.fully_shard"),
        ({"variants": ("defalt",)}, f"no variant 'defalt' of {DDP}; did you mean default"),
        ({"checks": ("losses.valu",)}, "did you mean losses.value"),
        ({"models": ("mpl",)}, "did you mean mlp"),
        ({"profiles": ("cor",)}, "did you mean core"),
        ({"cases": ("mlp/trian/*",)}, r"no case 'mlp/trian/\*'; did you mean 'mlp/train/\*'\?"),
        ({"cases": ("mlp/train/*", "x/y")}, "no case 'x/y'; this run has"),
        ({"cases": ("mlp/two_forwards",)}, "mlp/two_forwards is left out by the adapter's claims"),
        (
            {"cases": ("transformer/two_*",), "depth": Depth.NARROW},
            r"transformer/two_forwards is left out by .* \(it takes wide\)",
        ),
        ({"checks": ("state_dict.*",), "models": ("none",)}, "no model 'none'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_name_that_leads_to_nothing_is_wrong_usage(fields, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        work_of(Selection(**{"adapters": (DDP,), **fields}))


def test_a_case_that_is_not_there_is_answered_with_where_all_are() -> None:
    with pytest.raises(UsageError) as refused:
        work_of(Selection(adapters=(DDP,), variants=("default",), cases=("mlp/trian/*",)))
    items = work_of(Selection(adapters=(DDP,), variants=("default",))).items
    judged = {str(i.planned.case) for i in items if i.role is Role.JUDGED}
    assert str(refused.value).endswith(
        f"? this run has {len(judged)}, and fsdp-conformance list cases shows all"
    )


def test_every_case_stands_at_the_least_depth_that_takes_it() -> None:
    listed = every_case()
    assert list(listed) == list(dict.fromkeys(map(str, chain.from_iterable(map(planned, Depth)))))
    for depth in Depth:
        least = {case for case, at in listed.items() if at is depth}
        narrower = {str(c) for d in list(Depth)[: list(Depth).index(depth)] for c in planned(d)}
        assert least == {str(c) for c in planned(depth)} - narrower


@pytest.mark.parametrize(
    "fields",
    [
        {"variants": ("*",)},
        {"profiles": ("core",)},
        {"checks": ("*",)},
        {"models": ("*",)},
        {"cases": ("*",)},
        {"depth": Depth.NARROW},
    ],
    ids=str,
)
def test_leaving_something_out_makes_a_run_narrow(fields) -> None:
    assert Selection(adapters=(DDP,), **fields).narrowed
    assert not Selection(adapters=(DDP,)).narrowed
    assert not Selection(adapters=(DDP,), depth=Depth.FULL).narrowed
