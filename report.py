"""The report: result files -> one table with intervals, figures, and one HTML page with a tree viewer.

    python report.py                                   # runs/webshop: its results*.jsonl and q_labels.jsonl
    python report.py runs/a runs/b "100 demos=runs/c"  # several runs; LABEL=PATH tells otherwise equal methods apart

Reads  results*.jsonl (files, or run folders that hold them), q_labels.jsonl or trees.jsonl for the tree viewer
Writes report.html (self-contained: opens from the disk, without a network), report.md (the tables, printed too) and
       the figures as PNG beside them

Every number is a mean over tasks with its 95 % bootstrap interval (stats.py). Methods are compared on the same tasks,
and a difference whose interval covers 0 is called "no difference". A method that looks at the environment's true
reward before it answers is marked "oracle": it shows a ceiling, not what an agent could do.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import files
import page
import plots
from files import UserError
from stats import Estimate, bootstrap, by_task, kendall, paired_difference, spearman

# Table 2 of the paper (Llama-2-7B-Chat), reward x 100: WebShop; SciWorld and ALFWorld seen, unseen.
PAPER = {
    "greedy": {"webshop": (63.1,), "sciworld": (67.4, 53.0), "alfworld": (60.0, 67.2)},
    "rft": {"webshop": (63.6,), "sciworld": (71.6, 54.3), "alfworld": (62.9, 66.4)},
    "best_of_n": {"webshop": (67.9,), "sciworld": (70.2, 57.6), "alfworld": (62.1, 69.4)},
    "qlass": {"webshop": (70.3,), "sciworld": (75.3, 66.4), "alfworld": (77.9, 82.8)},
}
PAPER_NOTE = (
    "Paper: Table 2 divided by 100 (Llama-2-7B-Chat; other model, other data; SciWorld and ALFWorld seen / unseen; its "
    "best-of-N picks by the true reward). Tokens per task: generated = completion tokens of the policy, the paper's "
    "count; total = prompt computed + generated + scored by QNet."
)
DEFAULT_RUN = Path("runs/webshop")
METHODS = {  # in the order of the table
    "expert": "expert (knows the goal)",
    "random": "random candidate",
    "greedy": "SFT greedy",
    "sample": "SFT sampled",
    "rft": "SFT on best tree paths (RFT)",
    "best_of_n": "best-of-N",
    "qlass": "QLASS",
    "oracle_step": "step scorer by true reward (oracle)",
    "oracle_lookahead": "look-ahead of the released code (oracle)",
}


@dataclass(frozen=True)
class Method:
    """What one row of the table stands for."""

    env: str
    method: str
    M: int | None
    N: int | None
    select: str | None
    label: str

    @property
    def oracle(self) -> bool:
        return self.method.startswith("oracle") or (self.select == "oracle" and (self.N or 1) > 1)

    @property
    def name(self) -> str:
        name = METHODS.get(self.method, self.method)
        if (self.N or 1) > 1:
            name += {"q": ", picked by QNet", "oracle": ", picked by true reward (oracle)"}.get(self.select or "", "")
        return f"{name} [{self.label}]" if self.label else name

    @property
    def budget(self) -> str:
        """ "M=4 N=2", without what is 1."""
        return " ".join(f"{k}={v}" for k, v in (("M", self.M), ("N", self.N)) if (v or 1) > 1)

    @property
    def target(self) -> str | None:
        """The process reward that QNet learnt, where the label names one (Fig. 4)."""
        found = re.search(r"(?:^|target[ =:_-]*)(q|avg|reward)\b", self.label)
        return found[1] if found else "q" if self.method == "qlass" and not self.label else None

    @property
    def paper(self) -> str:
        if self.label or (self.method == "best_of_n" and not self.oracle):
            return "–"
        numbers = PAPER.get(self.method, {}).get(self.env.split()[0], ())
        return " / ".join(f"{x / 100:.3f}" for x in numbers) or "–"

    def order(self) -> tuple:
        rank = list(METHODS).index(self.method) if self.method in METHODS else len(METHODS)
        return self.env, rank, self.method, self.label, self.oracle, self.N or 1, self.M or 1


@dataclass
class Result:
    """One episode: the numbers of its line, and where the line is, so that its text need not stay in memory."""

    task: str
    seed: int
    reward: float
    success: float | None
    generated: float
    total: float  # tokens: prompt computed + generated + scored
    env_steps: float
    seconds: float
    q: list[float]  # QNet's value of each action taken, where it scored them
    where: tuple[Path, int, int]  # file, line number, byte offset


@dataclass
class Group:
    """All results of one method, keyed by (task, seed)."""

    method: Method
    results: dict[tuple[str, int], Result] = field(default_factory=dict)

    def values(self, name: str) -> dict[tuple[str, int], float]:
        pairs = ((key, getattr(result, name)) for key, result in self.results.items())
        return {key: float(value) for key, value in pairs if value is not None}

    @cached_property
    def reward(self) -> Estimate:
        return bootstrap(by_task(self.values("reward")).values())

    def mean(self, name: str) -> float:
        values = by_task(self.values(name)).values()
        return sum(values) / len(values) if values else math.nan

    def zero_share(self) -> float:
        return sum(result.reward == 0 for result in self.results.values()) / len(self.results)

    def seeds(self) -> str:
        """The number of seeds, and the lowest and highest of their mean rewards."""
        rewards = defaultdict(list)
        for (_task, seed), result in self.results.items():
            rewards[seed].append(result.reward)
        means = [sum(group) / len(group) for group in rewards.values()]
        return "1" if len(means) == 1 else f"{len(means)} ({min(means):.3f}–{max(means):.3f})"


# ------------------------------------------------------------------------------------------------------------- reading


def result_files(arguments: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(label, file) of each argument: a file, a folder's results*.jsonl, either with LABEL= in front."""
    for argument in arguments:
        label, path = "", Path(argument)
        if not path.exists() and "=" in argument:
            label, _, rest = argument.partition("=")
            path = Path(rest)
        if path.is_dir():
            found = sorted(path.glob("results*.jsonl"))
            if not found:
                raise UserError(f"{path}: no results*.jsonl in this folder; python q_search.py --run {path} writes one")
            yield from ((label, file) for file in found)
        elif path.is_file():
            yield label, path
        else:
            raise UserError(f"{path}: no such file or folder; python q_search.py writes results.jsonl")


def read_results(sources: Iterable[tuple[str, Path]]) -> list[Group]:
    """Read (label, file) pairs into one group a method, in the order of the table.

    UserError names file:line of a malformed line, and both lines where two results claim the same method, task and
    seed but differ. A last line that was cut short (a run that was stopped) is skipped with a warning.
    """
    groups: dict[Method, Group] = {}
    for label, path in sources:
        offset = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        method, result = parse_result(line, label, (path, number, offset))
                    except ValueError as error:
                        if line.endswith(b"\n"):
                            raise UserError(f"{path}:{number}: {error}; mend or delete this line") from None
                        print(f"warning: {path}:{number}: skipped, cut short by a stopped run", file=sys.stderr)
                    else:
                        insert(groups.setdefault(method, Group(method)), result)
                offset += len(line)
    if not groups:
        raise UserError("the result files hold no result; python q_search.py writes some")
    return [groups[method] for method in sorted(groups, key=Method.order)]


def parse_result(line: bytes, label: str, where: tuple[Path, int, int]) -> tuple[Method, Result]:
    """ValueError says what is wrong with a line."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is expected, not {type(row).__name__}")
    if missing := [name for name in ("task_id", "env", "method", "reward", "tokens") if row.get(name) is None]:
        raise ValueError(f"{', '.join(missing)} missing")
    if not (isinstance(row["reward"], int | float) and math.isfinite(row["reward"])):
        raise ValueError(f"reward is {row['reward']!r}, not a number")
    if not isinstance(row["tokens"], dict):
        raise ValueError('tokens is not {"prompt", "generated", "scored"}')
    steps, tokens = row.get("steps") or [], row["tokens"]
    label = ", ".join(filter(None, (label, row.get("label") or "")))
    split = row.get("split") if row.get("split") not in (None, "test") else ""
    env = f"{row['env']} {split}".strip()
    return Method(env, row["method"], row.get("M"), row.get("N"), row.get("select"), label), Result(
        task=str(row["task_id"]),
        seed=row.get("seed") or 0,
        reward=row["reward"],
        success=row.get("success"),
        generated=tokens.get("generated", 0),
        total=sum(tokens.get(part, 0) for part in ("prompt", "generated", "scored")),
        env_steps=row.get("env_steps", row.get("n_steps", len(steps))),
        seconds=row.get("seconds", 0),
        q=[q for step in steps if (q := taken_q(step)) is not None],
        where=where,
    )


def taken_q(step: dict) -> float | None:
    """QNet's value of the action taken in a step, or None."""
    scored = [c["q"] for c in step.get("candidates") or [] if c["action"] == step["action"] and c.get("q") is not None]
    return max(scored, default=None)


def insert(group: Group, result: Result) -> None:
    old = group.results.setdefault((result.task, result.seed), result)
    if (old.reward, old.total, old.q) != (result.reward, result.total, result.q):
        places = " and ".join(f"{path}:{number}" for path, number, _ in (old.where, result.where))
        raise UserError(
            f"{places}: two different results of {group.method.name} for task {result.task}, seed {result.seed}; "
            'name the runs apart: python report.py "first=PATH" "second=PATH"'
        )


def load_row(result: Result) -> dict:
    path, _, offset = result.where
    with open(path, "rb") as lines:
        lines.seek(offset)
        return json.loads(lines.readline())


# -------------------------------------------------------------------------------------------------------------- tables


Table = tuple[list[str], list[list[str]]]  # head, rows


def interval(estimate: Estimate, sign: str = "") -> str:
    if math.isnan(estimate.low):
        return f"{estimate.mean:{sign}.3f}"
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def number(value: float, digits: int = 0) -> str:
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def results_table(groups: Sequence[Group]) -> Table:
    head = [
        "environment",
        "method",
        "M",
        "N",
        "tasks",
        "seeds (their means)",
        "reward [95 %]",
        "success",
        "zero reward",
    ]
    head += ["generated tokens", "total tokens", "env steps", "seconds", "paper"]
    rows = []
    for group in groups:
        m = group.method
        rows.append([m.env, m.name, str(m.M or "–"), str(m.N or "–"), str(group.reward.n), group.seeds()])
        rows[-1] += [interval(group.reward), number(group.mean("success"), 3), f"{group.zero_share():.3f}"]
        rows[-1] += [number(group.mean("generated")), number(group.mean("total")), number(group.mean("env_steps"), 1)]
        rows[-1] += [number(group.mean("seconds"), 2), m.paper]
    return head, rows


def comparisons(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Which methods are compared: each with greedy; QLASS with best-of-N; a labelled one with the same unlabelled."""
    for a in groups:
        for label in dict.fromkeys((a.method.label, "")):  # greedy of the same run where it has one
            greedy = [b for b in groups if b.method.method == "greedy" and b.method.label == label]
            if greedy := [b for b in greedy if b.method.env == a.method.env]:
                yield a, greedy[0]
                break
        peers = [b for b in groups if b.method.env == a.method.env and b.method.label in (a.method.label, "")]
        if a.method.method == "qlass":
            for oracle in (False, True):
                rivals = [b for b in peers if b.method.method == "best_of_n" and b.method.oracle == oracle]
                own = [b for b in rivals if b.method.label == a.method.label] or rivals
                if own and a.mean("total") > 0:  # at equal cost, and at an equal number of samples
                    yield a, min(own, key=lambda b: abs(math.log((b.mean("total") or 1e-9) / a.mean("total"))))
                yield from ((a, b) for b in own if (b.method.N or 1) == (a.method.M or 1) * (a.method.N or 1))
        if a.method.label:
            same = [b for b in peers if (b.method.method, b.method.label) == (a.method.method, "")]
            kind = (a.method.M, a.method.N, a.method.select)
            yield from ((a, b) for b in same if (b.method.M, b.method.N, b.method.select) == kind)


def differences_table(groups: Sequence[Group]) -> Table:
    head = ["environment", "method", "minus", "tasks", "difference [95 %]", "total tokens (ratio)", "verdict"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for a, b in comparisons(groups):
        if a is b:
            continue
        difference = paired_difference(a.values("reward"), b.values("reward"))
        if difference.n == 0:
            continue
        names = [f"{g.method.name} {g.method.budget}".strip() for g in (a, b)]
        ratio = f"{a.mean('total') / b.mean('total'):.2f}" if b.mean("total") else "–"
        verdict = "no difference" if difference.covers_zero else "higher" if difference.mean > 0 else "lower"
        rows[a.method.env, *names] = [
            a.method.env,
            *names,
            str(difference.n),
            interval(difference, "+"),
            ratio,
            verdict,
        ]
    return head, list(rows.values())


def calibration_table(groups: Sequence[Group]) -> Table:
    head = ["environment", "method", "scored steps", "Spearman's rho", "Kendall's tau-b"]
    rows = []
    for group in groups:
        q, returns = scored_steps(group)
        if len(q) > 1:
            some = slice(None, None, 1 + len(q) // 5000)  # tau is quadratic
            name = f"{group.method.name} {group.method.budget}".strip()
            rho, tau = spearman(q, returns), kendall(q[some], returns[some])
            rows.append([group.method.env, name, str(len(q)), number(rho, 3), number(tau, 3)])
    return head, rows


def scored_steps(group: Group) -> tuple[list[float], list[float]]:
    """q of each action taken, and the final reward of its episode."""
    pairs = [(q, result.reward) for result in group.results.values() for q in result.q]
    return [q for q, _ in pairs], [reward for _, reward in pairs]


def markdown(table: Table) -> str:
    head, rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(re.sub(r"\s+", " ", c).replace("|", "\\|") for c in line) + " |" for line in lines
    )


# ---------------------------------------------------------------------------------------------------- one task, Fig. 5


def cases(groups: Sequence[Group]) -> Iterator[tuple[str, dict, dict]]:
    """(title, greedy's row, QLASS's row): QLASS's largest gain, its largest loss, and one without a difference."""
    for greedy in (g for g in groups if g.method.method == "greedy" and not g.method.label):
        guided = [g for g in groups if (g.method.env, g.method.method) == (greedy.method.env, "qlass")]
        guided = [g for g in guided if not (g.method.label or g.method.oracle)]
        if not guided:
            continue
        best = max(guided, key=lambda g: g.reward.mean)
        by_name = {task: result for (task, _seed), result in reversed(greedy.results.items())}
        pairs = [(result, by_name[task]) for (task, _), result in best.results.items() if task in by_name]
        pairs.sort(key=lambda pair: (pair[0].reward - pair[1].reward, pair[0].task))
        even = [pair for pair in pairs if pair[0].reward == pair[1].reward > 0]
        chosen = [("Largest gain", pairs[-1:]), ("Largest loss", pairs[:1]), ("No difference", even[:1])]
        for title, pair in chosen:
            for b, a in pair:
                if (b.reward - a.reward) * {"Largest gain": 1, "Largest loss": -1}.get(title, 0) >= 0:
                    yield f"{title}: {greedy.method.env}, task {b.task}", load_row(a), load_row(b)


# ---------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables, figures and an HTML page from result files.")
    parser.add_argument(
        "results", nargs="*", help="results*.jsonl or run folders, LABEL=PATH to name one; default: RUN"
    )
    parser.add_argument("--run", type=Path, help=f"run folder (that of the first result file, or {DEFAULT_RUN})")
    parser.add_argument("--trees", type=Path, help="q_labels.jsonl or trees.jsonl to show (default: the run folder's)")
    parser.add_argument("--max-trees", type=int, default=60, help="trees put into the page (%(default)s)")
    parser.add_argument("--out", type=Path, help="the page; report.md and the figures go beside it (RUN/report.html)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    sources = list(result_files(args.results or [str(args.run or DEFAULT_RUN)]))
    run = args.run or sources[0][1].parent
    groups = read_results(sources)
    out = args.out or run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    trees = args.trees or next((p for p in (run / "q_labels.jsonl", run / "trees.jsonl") if p.exists()), None)

    results, differences, calibration = results_table(groups), differences_table(groups), calibration_table(groups)
    text = f"{markdown(results)}\n\n{PAPER_NOTE}\n\nPaired differences in reward\n\n{markdown(differences)}\n"
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)

    figures = []
    for env in dict.fromkeys(group.method.env for group in groups):
        here = [group for group in groups if group.method.env == env]
        for name, draw in (("tokens", plots.tokens), ("targets", plots.targets), ("calibration", plots.calibration)):
            if figure := draw(here):
                picture = out.with_name(f"{out.stem}_{name}_{env.replace(' ', '_')}.png")
                figures.append((name, env, plots.save(figure, picture)))
    content = {
        "results": page.table(*results) + page.paragraph(PAPER_NOTE),
        "differences": page.table(*differences),
        "calibration": page.table(*calibration) if calibration[1] else "",
        "figures": figures,
        "cases": "".join(page.case(*case) for case in cases(groups)),
        "trees": page.tree_data(trees, args.max_trees),
        "inputs": [str(path) for _, path in sources] + [str(trees)] * bool(trees),
    }
    out.write_text(page.render(content), encoding="utf-8")
    print(f"{out}, {out.with_suffix('.md')} and {len(figures)} figures beside them")


if __name__ == "__main__":
    files.run_stage(main)
