"""Runs told by hand: what the oracle saw, and where the wrapper saw something else. No processes.

`Story` holds the observations of a run in the order in which they are made. The wrapper's history
is the oracle's but for what `instead` replaces, so a test states one defect and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conformance.adapter import Conventions
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS, Evidence, Ledger
from conformance.checks.evidence import Mismatch
from conformance.checks.updates import stepped
from conformance.history import History, Observation, Phase, RankHistory
from conformance.models import TRAITS, ModelCase
from conformance.names import CAPABILITIES
from conformance.optimizers import optimizer_named
from conformance.ranks import CollectiveRecord
from conformance.tolerance import Oracle

WORLD = 2
Where = Mapping[str, Any]


class Net(nn.Module):
    """One parameter under two names, a frozen one, one that forward never uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 7 - 0.8)
        self.head = self.body
        self.bias = nn.Parameter(torch.tensor([0.3, -0.2, 0.9]))
        self.kept = nn.Parameter(torch.tensor([1.5, 2.5]), requires_grad=False)
        self.spare = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.register_buffer("mean", torch.zeros(3))


USED = ("body", "head", "bias")

MODEL = ModelCase(
    name="literal",
    why="every peculiarity in one module of 19 elements",
    traits=frozenset(TRAITS) - {"mixed"},  # whose frozen parameters may be reduced as padding
    build=Net,
    batch=lambda rank, step, micro: None,
    loss=lambda module, batch: torch.zeros(()),
    units=(),
)


@dataclass
class Story:
    """Observations of one run, and what the wrapper saw instead."""

    case: Case
    conventions: Conventions = field(default_factory=Conventions)
    capabilities: frozenset[str] = frozenset(CAPABILITIES)
    phases: list[str] = field(default_factory=list)
    seen: list[tuple[str, Where, list[Any], tuple[int, int]]] = field(default_factory=list)
    wrong: dict[tuple[int, str, str], Any] = field(default_factory=dict)
    collectives: list[list[CollectiveRecord]] = field(default_factory=lambda: [[], []])
    replicas: int = 1

    def phase(self, name: str) -> None:
        """What follows happens in this phase."""
        self.phases.append(name)

    def see(self, what: str, *of_ranks: Any, **where: Any) -> None:
        """An observation: one value for all ranks, or one for each."""
        values = [copy.deepcopy(of_ranks[r % len(of_ranks)]) for r in range(WORLD)]
        self.seen.append((what, where, values, (len(self.phases) - 1, len(self.seen))))

    def instead(self, what: str, value: Any, *, rank: int | None = None, **where: Any) -> None:
        """The wrapper saw `value` on `rank`, or on all; a mapping changes only its own keys."""
        for each in range(WORLD) if rank is None else (rank,):
            known = self.value(what, each, **where)
            new = {**known, **value} if isinstance(value, Mapping) else value
            self.wrong[each, what, str(where)] = new

    def value(self, what: str, rank: int = 0, **where: Any) -> Any:
        """What the wrapper saw."""
        key = (rank, what, str(where))
        if key in self.wrong:
            return self.wrong[key]
        return next(v[rank] for w, at, v, _ in self.seen if w == what and dict(at) == where)

    def collective(self, op: str, phase: str, *, rank: int | None = None, **fields: Any) -> None:
        """A collective of the default group, on one rank or on all."""
        for each in range(WORLD) if rank is None else (rank,):
            index = len(self.collectives[each])
            content: dict[str, Any] = {
                "numel": 15,
                "dtype": "float32",
                "reduce_op": "sum",
                "backward": True,
                "group": "default",
                "group_ranks": (0, 1),
                "stream": "default#0",
            }
            self.collectives[each].append(
                CollectiveRecord(
                    index=index, nth=index + 1, op=op, phase=phase, **{**content, **fields}
                )
            )

    def evidence(self) -> Evidence:
        """What a check gets."""
        truth = self._history(wrapper=False)
        return Evidence(
            case=self.case,
            model=MODEL,
            history=self._history(wrapper=True),
            oracle=Oracle(reference=truth, double=truth, reversed=truth),
            conventions=self.conventions,
            capabilities=self.capabilities,
            replicas=self.replicas,
        )

    def _history(self, *, wrapper: bool) -> History:
        phases = tuple(Phase(ordinal=i, name=n, ended=True) for i, n in enumerate(self.phases))
        return History(
            ranks=tuple(
                RankHistory(
                    rank=rank,
                    phases=phases,
                    observations=tuple(
                        Observation(
                            what=what,
                            where=where,
                            value=self.value(what, rank, **where) if wrapper else values[rank],
                            moment=moment,
                        )
                        for what, where, values, moment in self.seen
                    ),
                    collectives=tuple(asdict(r) for r in self.collectives[rank]) if wrapper else (),
                )
                for rank in range(WORLD)
            ),
            virtual=not wrapper,
        )


def tied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the second name of the tied parameter."""
    return {**tree, "head": tree["body"]}


def training(
    *,
    accumulation: int = 1,
    optimizer: str = "sgd",
    steps: int = 2,
    scenario: str = "train",
    spare: Tensor | None = None,
) -> Story:
    """A right run: losses, gradients, clipping in step 1, parameters and buffers of each step.

    `spare` is the gradient of the unused parameter, which moves by it.
    """
    case = Case.of("literal", scenario, accumulation=accumulation, optimizer=optimizer)
    story, draw = Story(case=case), torch.Generator().manual_seed(7)
    values = {name: p.detach().clone() for name, p in Net().named_parameters()}
    past: list[dict[str, Tensor]] = []
    others = {"kept": None, "spare": spare}
    start = dict(values)
    buffers = [torch.zeros(3) for _ in range(WORLD)]
    story.phase("build")
    story.see("parameters", tied(values), step=-1)
    story.see("buffers", *({"mean": b} for b in buffers), step=-1)
    for step in range(steps):
        story.phase(f"step {step}")
        micro = [
            [
                {n: torch.randn(start[n].shape, generator=draw) for n in ("body", "bias")}
                for _ in range(WORLD)
            ]
            for _ in range(accumulation)
        ]
        own = [_mean([m[r] for m in micro]) for r in range(WORLD)]
        gradients = _mean(own)
        for index in range(accumulation):
            losses = [torch.tensor(5.0 - step - 0.3 * r - 0.1 * index) for r in range(WORLD)]
            story.see("stale_loss", *(x + 0.7 for x in losses), step=step, micro=index)
            story.see("loss", *losses, step=step, micro=index)
            story.collective("all_gather", f"step {step}/micro {index}", reduce_op=None)
        story.collective("all_reduce", f"step {step}/micro {accumulation - 1}")
        full = tied({**gradients, **others})
        if step == 0 and accumulation > 1:
            story.see("gradients_big_batch", full, step=0)
        story.see("gradients", full, step=step)
        story.see("gradients_of_rank", *(tied(g) for g in own), step=step)
        last = {n: g / accumulation for n, g in _mean(micro[-1]).items()}
        story.see("gradients_last_micro", tied(last), step=step)
        for index, of_ranks in enumerate(micro if step == 0 and accumulation > 1 else ()):
            parts = [tied({n: g / accumulation for n, g in part.items()}) for part in of_ranks]
            story.see("gradients_of_micro", *parts, step=0, micro=index)
        if accumulation > 1:
            shares = [{n: g / accumulation for n, g in _mean(m).items()} for m in micro]
            powers = [2.0 ** (accumulation - 1 - index) for index in range(accumulation)]
            doubled = {
                n: sum(f * share[n] for f, share in zip(powers, shares, strict=True))
                for n in shares[0]
            }
            story.see("gradients_doubled", tied(doubled), step=step)
        if step == 1:
            norm = torch.stack([g.norm() for g in gradients.values()]).norm()
            story.see("grad_norm", norm, step=step, p="2", max_norm=0.1)
            gradients = {n: g * 0.1 / norm for n, g in gradients.items()}
            story.see("clipped", tied({**gradients, **others}), step=step)
        past.append(gradients if spare is None else {**gradients, "spare": spare})
        for name in past[0]:
            values[name] = stepped(optimizer_named(optimizer), start[name], [g[name] for g in past])
        story.see("parameters", tied(values), step=step)
        story.see("optimizer_state", {"body/step": torch.tensor(step + 1.0)}, step=step)
        buffers = [0.9 * b + 0.1 * (r + step + 1) for r, b in enumerate(buffers)]
        story.see("buffers", *({"mean": b} for b in buffers), step=step)
    story.phase("eval")
    story.see("eval_loss", torch.tensor(2.0), torch.tensor(2.5), index=0)
    story.see("parameters_after_eval", tied(values), index=0)
    story.see("buffers_after_eval", *({"mean": b} for b in buffers), index=0)
    return story


def _mean(trees: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([tree[n] for tree in trees]).mean(0) for n in trees[0]}


def first_mismatch(check: str, story: Story) -> Mismatch | None:
    """The first thing that `check` finds wrong; it has compared something in any case."""
    ledger = Ledger()
    judge = CHECKS[check].judge
    assert judge is not None
    judge(story.evidence(), ledger)
    assert ledger.comparisons > 0, f"{check} has compared nothing"
    return ledger.first()


def cause(check: str, story: Story) -> Cause | None:
    """The cause that `check` states; ``None`` if it holds."""
    first = first_mismatch(check, story)
    return None if first is None else first.cause


def kinds_judged(check: str) -> set[str]:
    """The kinds of saved state of which `check` says something."""
    return {
        kind
        for kind in ("full", "sharded", "local", "save")
        if CHECKS[check].applies(Case.of("literal", "checkpoint", kind=kind), MODEL)
    }
