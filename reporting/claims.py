"""What the result files say about each claim of the paper: reproduced, not reproduced, or undecided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qlass.stats import Estimate, holm, paired_difference
from reporting.results import Condition, Group

NOTE = (
    "By the paired difference over the tasks and seeds that both have, with its 95 % interval: reproduced where it is"
    " above 0 (“level with” allows 0.02 less), not reproduced where it is below, either with p below .05 after "
    "correction for all comparisons here (Holm); else undecided. Equal tokens: the rival nearest in total tokens, if "
    "they differ by no more than 30 %. The interval is over seeds (trainings) and tasks, of which those that vary "
    "together count as one block; with one seed it is over tasks, and the verdict holds for this model: another "
    "training may give another."
)
LEVEL = 0.02  # of the reward: who is less than this below is level
EQUAL = 1.3  # the ratio up to which costs count as equal
TARGETS = {"avg": "averaged rewards", "reward": "plain final rewards"}


@dataclass(frozen=True)
class Claim:
    """`comparisons`: where it can be tested, and two methods there of which the first is to be above b - margin."""

    text: str
    comparisons: list[tuple[str, Group, Group]]
    margin: float = 0.0

    def tests(self) -> Iterator[tuple[tuple, str, Estimate, float]]:
        """What can be tested: a key for what is compared, in words, the difference, and p of its being -margin."""
        for setting, a, b in self.comparisons:
            first, second = a.values("reward"), b.values("reward")
            difference = paired_difference(first, second, a.blocks)
            if difference.n:
                shared = a.results.keys() & b.results.keys()
                seeds = [{seed for _, seed in side} for side in ([shared] if shared else [a.results, b.results])]
                alone = "" if all(len(side) > 1 for side in seeds) else ", for this model"
                lifted = {key: value + self.margin for key, value in first.items()}
                p = paired_difference(lifted, second, a.blocks).p if self.margin else difference.p
                key = id(a), id(b), self.margin
                yield key, f"{setting}: {difference:+}{alone}", difference, 1.0 if math.isnan(p) else p


def verdict(mean: float, p: float) -> str:
    """Of the claim that a difference, margin added, is above 0."""
    return "undecided" if p >= 0.05 else "reproduced" if mean > 0 else "not reproduced"


def ratio(a: Group, b: Group) -> float:
    """Of their total tokens, the larger over the smaller."""
    return math.exp(abs(math.log((b.mean("total") or 1e-9) / a.mean("total"))))


def nearest(a: Group, others: Sequence[Group]) -> Group:
    """The one whose total tokens are nearest to those of `a`."""
    return min(others, key=lambda b: ratio(a, b))


def claims(groups: Sequence[Group]) -> Iterator[Claim]:
    """The paper's claims in words, with the comparisons that these results of one environment allow."""
    plain = [g for g in groups if not g.condition.label]
    greedy = [g for g in plain if g.condition.method == "greedy"]
    guided = [g for g in groups if g.condition.method == "qlass" and (g.condition.N or 1) == 1]
    qlass = [g for g in guided if g in plain]

    yield Claim("QLASS above SFT greedy (Table 2)", [(a.condition.budget, a, b) for a in qlass for b in greedy])
    for oracle, how in ((False, "by QNet"), (True, "by the true reward, as the paper's is")):
        rivals = [g for g in plain if (g.condition.method, g.condition.oracle) == ("best_of_n", oracle)]
        text = f"QLASS above best-of-N, picked {how}, at equal tokens (Fig. 3)"
        yield Claim(text, at_equal_tokens(qlass, rivals))
    alone = [g for g in plain if g.condition.method == "likeliest"]
    yield Claim(
        "QLASS above search by the agent's own log-probability, with as many candidates",
        [(a.condition.budget, a, b) for a in qlass for b in alone if a.condition.M == b.condition.M],
    )
    text = "QLASS above search by the agent's own log-probability, at equal tokens"
    yield Claim(text, at_equal_tokens(qlass, alone))
    for target, name in TARGETS.items():
        pairs = [(a, b) for b in groups if b.condition.target == target for a in groups
                 if a.condition.target == "q" and role(a.condition) == role(b.condition)]  # fmt: skip
        yield Claim(f"Q-values above {name} (Fig. 4)", [(where(a.condition), a, b) for a, b in pairs])
    for label in dict.fromkeys(g.condition.label for g in guided if "demonstrations" in g.condition.label):
        fewer = [g for g in guided if g.condition.label == label]
        with_all = {
            "SFT greedy": [(a, b) for a in fewer for b in greedy],
            "QLASS": [(a, b) for a in fewer for b in qlass if a.condition.M == b.condition.M],
        }
        for name, pairs in with_all.items():
            text = f"QLASS with {label} level with {name} on all of them or above (Table 3)"
            yield Claim(text, [(a.condition.budget, a, b) for a, b in pairs], LEVEL)


def at_equal_tokens(some: Sequence[Group], rivals: Sequence[Group]) -> list[tuple[str, Group, Group]]:
    """Each beside the rival nearest in cost, and what both cost; those without a rival of equal cost are left out."""
    pairs = [(a, nearest(a, rivals)) for a in some if rivals and a.mean("total") > 0]
    return [(f"{cost(a)} against {cost(b)}", a, b) for a, b in pairs if ratio(a, b) <= EQUAL]


def cost(group: Group) -> str:
    return f"{group.condition.budget or 'N=1'} ({group.mean('total'):,.0f} tokens)"


def role(condition: Condition) -> tuple:
    """What a QNet is used for: two that differ in their process reward alone can be compared."""
    return condition.method, condition.M, condition.N, condition.select, condition.self_trained, condition.otherwise


def where(condition: Condition) -> str:
    used = "self-training" if condition.self_trained else f"search, {condition.budget or 'M=1'}"
    return ", ".join(filter(None, (used, condition.otherwise)))


def sentences(groups: Sequence[Group]) -> list[str]:
    """ "webshop: QLASS above ...: reproduced (M=2: +0.085 [+0.068, +0.101]; ...), undecided (...)."

    One for each environment and claim that the results can tell about.
    """
    tests = [
        (f"{env}: {claim.text}", claim.margin, *test)
        for env in dict.fromkeys(g.condition.env for g in groups)
        for claim in claims([g for g in groups if g.condition.env == env])
        for test in claim.tests()
    ]
    distinct = {key: p for _, _, key, *_, p in tests}  # two claims may compare the same
    corrected = dict(zip(distinct, holm(list(distinct.values())), strict=True))
    found: dict[str, dict[str, list[str]]] = {}
    for text, margin, key, said, difference, _ in tests:
        sorted_by = found.setdefault(text, {"reproduced": [], "undecided": [], "not reproduced": []})
        sorted_by[verdict(difference.mean + margin, corrected[key])].append(said)
    return [
        f"{text}: " + ", ".join(f"{name} ({'; '.join(some)})" for name, some in verdicts.items() if some) + "."
        for text, verdicts in found.items()
    ]
