"""How well the scores of a search rank actions on FrozenLake, where the exact Q* is known.

python -m experiments.qstar runs/frozenlake/results.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable

import numpy as np

from environments import UserError
from environments.frozenlake.lake import MOVES, load, q_star
from qlass.chat import action_key
from qlass.jsonl import read_jsonl
from qlass.stage import run_stage
from qlass.stats import kendall, spearman


def agreement(rows: Iterable[dict], gamma: float = 0.9) -> dict[str, float]:
    """Lines of results.jsonl against the exact Q*(s, a).

    optimal_moves: the share of the moves taken that have the highest Q* of all four. Over the candidates with a q, each
    as often as it was met: spearman and kendall (tau-b) of q and Q*, and of the states whose candidates differ in Q*
    in_order, the share of pairs of candidates that q ranks as Q* does (equal q count half), and top_1, the share where
    the candidate with the highest q has the highest Q* among them. chance: in_order of a coin, top_1 of a blind draw.
    """
    found: list[tuple[float, float]] = []
    optimal, in_order, top, blind = [], [], [], []
    for row in rows:
        lake = load(row["task_id"])
        cell, table = int(lake.s), q_star(lake, gamma)
        for step in row["steps"]:
            values = dict(zip(MOVES, table[cell], strict=True))
            stay = gamma * table[cell].max()  # what an invalid action is worth: it only costs its step
            optimal.append(values.get(action_key(step["action"]), stay) > table[cell].max() - 1e-9)
            met = [(c["q"], values.get(action_key(c["action"]), stay)) for c in step["candidates"]]
            met = [pair for pair in met if pair[0] is not None]
            found += met
            ranked = [(x[0] - y[0], x[1] - y[1]) for x, y in itertools.combinations(met, 2)]
            ranked = [pair for pair in ranked if abs(pair[1]) > 1e-9]
            if ranked:
                in_order += [0.5 if dq == 0 else float((dq > 0) == (truth > 0)) for dq, truth in ranked]
                best = [truth > max(met, key=lambda pair: pair[1])[1] - 1e-9 for _, truth in met]
                top.append(best[max(range(len(met)), key=lambda i: met[i][0])])
                blind.append(np.mean(best))
            where = re.search(r"cell (\d)(\d)", step["observation"])
            cell = int(where[1]) * lake.ncol + int(where[2])
    figures = {"optimal_moves": np.mean(optimal), "states": len(optimal)}
    if in_order:
        q, truth = zip(*found, strict=True)
        figures |= {"pairs": len(found), "spearman": spearman(q, truth), "kendall": kendall(q, truth)}
        figures |= {"in_order": np.mean(in_order), "top_1": np.mean(top), "top_1_by_chance": np.mean(blind)}
    return {name: float(figure) for name, figure in figures.items()}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rank agreement of the candidates' q with Q*, for each method.")
    parser.add_argument("results", nargs="+", help="results.jsonl of q_search.py --env frozenlake")
    parser.add_argument("--gamma", type=float, default=0.9, help="of Q* (default: %(default)s, as in bellman.py)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    groups: dict[str, list[dict]] = {}
    for row in itertools.chain.from_iterable(map(read_jsonl, args.results)):
        if row.get("env") != "frozenlake":
            raise UserError(f"{args.results[0]}: results of {row.get('env')}, not of frozenlake")
        name = f"{row['method']} M={row['M']} N={row['N']}" + (f" by {row['select']}" if row["select"] else "")
        groups.setdefault(name, []).append(row)
    print("| method | tasks | success | moves that are optimal | candidate pairs in Q*'s order | best first "
          "| by chance | Spearman | Kendall |\n|" + "---|" * 9)  # fmt: skip
    for name, rows in groups.items():
        f = agreement(rows, args.gamma)
        cells = [np.mean([row["success"] for row in rows]), f["optimal_moves"]]
        cells += [f.get(k, np.nan) for k in ("in_order", "top_1", "top_1_by_chance", "spearman", "kendall")]
        print(f"| {name} | {len(rows)} | " + " | ".join("–" if np.isnan(c) else f"{c:.3f}" for c in cells) + " |")


if __name__ == "__main__":
    run_stage(main)
