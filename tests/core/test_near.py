"""A misspelt name or pattern is answered with what it may have meant, or with nothing."""

from __future__ import annotations

import pytest

from conformance.adapter import Adapter
from conformance.checks import CHECKS
from conformance.globs import matches
from conformance.models import cases
from conformance.near import FEW, is_slip, near_matches, offer
from conformance.plan import every_case

NAMES = ["losses.value", "gradients.value", "gradients.scale", "clip.norm", "clip.gradients"]
CASES = [
    f"{model}/{scenario}/accumulation={micro},optimizer={optimizer}"
    for model in ("mlp", "tiny")
    for scenario in ("train", "unused")
    for micro in (1, 3)
    for optimizer in ("sgd", "adamw")
]
UNUSED_SGD = [f"tiny/unused/accumulation={micro},optimizer=sgd" for micro in (1, 3)]


@pytest.mark.parametrize(
    ("got", "near"),
    [
        ("losses.valeu", ["losses.value"]),
        ("lossse.*", ["losses.value"]),
        ("clip", ["clip.norm", "clip.gradients"]),
        ("*.gradient", ["clip.gradients"]),
        ("value", ["losses.value", "gradients.value"]),
        ("Clip.Norm", ["clip.norm"]),
        ("clp_norm", ["clip.norm"]),
        ("gradient", ["clip.gradients", "gradients.value", "gradients.scale"]),
        ("gradints*", ["gradients.value", "gradients.scale"]),
        ("nope", []),
        ("zzz*", []),
        ("", []),
        ("v", []),  # one letter is part of everything
        ("va", ["losses.value", "gradients.value"]),
    ],
)
def test_a_pattern_is_mended_word_by_word(got: str, near: list[str]) -> None:
    assert near_matches(got, NAMES, patterns=True) == near


@pytest.mark.parametrize(
    ("got", "near"),
    [
        ("*trian*", ["*train*"]),
        ("train", ["*train*"]),
        ("mlp/train", ["*mlp/train*"]),
        ("*/trai", ["*/trai*"]),
        ("mpl/*adamW", ["mlp/*adamw"]),
        ("tiny/unused/optimizer=sgd", UNUSED_SGD),
        ("tiny/unsued/*=sdg", UNUSED_SGD),
        ("*/nope/*", []),
    ],
)
def test_more_than_a_few_names_are_answered_with_a_pattern_for_them(
    got: str, near: list[str]
) -> None:
    assert near_matches(got, CASES, patterns=True) == near


@pytest.mark.parametrize("got", ["gradient", "train", "clip"])
def test_where_a_name_is_asked_for_no_pattern_is_offered(got: str) -> None:
    near = near_matches(got, [*NAMES, *CASES])
    assert 0 < len(near) <= FEW
    assert set(near) <= {*NAMES, *CASES}


@pytest.mark.parametrize("names", [list(CHECKS), list(cases()), list(every_case())])
def test_what_is_offered_leads_to_something(names: list[str]) -> None:
    for name in names:
        slip = name[1] + name[0] + name[2:]
        offered = near_matches(slip, names, patterns=True)
        assert any(matches(name, pattern) for pattern in offered), (slip, offered)


def test_an_offer_can_be_typed_into_a_shell() -> None:
    assert offer(["clip.norm", "hybrid,replicas=2"]) == (
        "did you mean clip.norm or hybrid,replicas=2?"
    )
    assert offer(["*train*"]) == "did you mean '*train*'?"
    assert offer([]) == ""


PUBLIC = [name for name in vars(Adapter) if name[0] != "_"]
VERBS = [name for name in PUBLIC if callable(getattr(Adapter, name))]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_with_letters_swapped_left_out_or_doubled_is_a_slip(verb: str) -> None:
    swapped = {verb[:at] + verb[at + 1] + verb[at] + verb[at + 2 :] for at in range(len(verb) - 1)}
    left_out = {verb[:at] + verb[at + 1 :] for at in range(len(verb))} - {verb.removesuffix("s")}
    doubled = {verb[:at] + verb[at] + verb[at:] for at in range(len(verb))}
    words = verb.split("_")
    written = {"".join(words), "__".join(words), words[0] + "".join(map(str.title, words[1:]))}
    for slip in swapped | left_out | doubled | written:
        assert is_slip(slip, verb), slip
    assert is_slip(f"{verb}s", verb) == ("_" in verb or verb[-1] == "s")  # saves is a word


HELPERS = """
bear buffer configured convention evaluates local_tensor parameters_full replica variant weight
accumulate all_gather all_reduce apply_policy auto_wrap_policy average_weights backend barrier base
begin broadcast build_engine build_module build_optimizer built bucket_size buffer_names cast_inputs
clip clip_gradients clip_norm close compute_loss context_for cpu_offload create_engine device_mesh
drain engine engine_config eval_loss evaluate_loss finish_step flat_parameters flatten flush
forward_backward forward_pass free full_model_state full_optim_state full_params full_state
full_state_dict full_tensors gather gather_gradients get_gradients get_model_state grad_scaler
gradients hooks init_engine inner is_sharded load_checkpoint load_model load_optimizer
load_optimizer_state load_parameters load_state load_state_dict load_weights loaded loader loads
local_buffers local_parameters local_shards local_state loss make_engine make_mesh make_module
make_optimizer mesh micro_step model model_parameters model_state_dict module named_parameters
no_grad no_reduce norm offload optim optimizer optimizer_state_dict parameters post_step pre_step
read_gradients reduce reduce_gradients release reshard restore root run_step save_checkpoint
save_model save_state saved saver saves scale_loss scaler set_options setup shard shards
sharded_state state_dict stepped steps stop summon sync sync_gradients teardown train_step trainable
unshard unwrap wait weight_dtype weights_of wrap wrap_module zero zero_gradients
"""


def test_names_that_helpers_have_are_no_slips() -> None:
    told = {(name, verb) for name in HELPERS.split() for verb in PUBLIC if is_slip(name, verb)}
    assert told == set()


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("conventons", "conventions"),
        ("capabilites", "capabilities"),
        ("no_snyc", "no_sync"),
        ("zero_grads", "zero_grad"),
    ],
)
def test_a_slip_is_known(got: str, meant: str) -> None:
    assert is_slip(got, meant)
