"""A run of the real stages, and what is kept of it: the answers of the models to what one tree and two episodes asked.

A recording is JSON Lines. `part` is the environment; `kind` is `run` (commands, printed lines, versions), `tokenizer`,
`tree` or `episode`; `said` maps the digest of a request to the drawn actions, or to QNet's values.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from walkthrough.replay import GREEDY, LAKE, QLASS, Branch, Models, digest, essence, grow, name, play, small_lake

import bellman
import envs
import q_search
from qlass import UserError
from qlass.chat import Chat
from qlass.driver import Candidate, Sample, Score, drive
from qlass.files import meta_path, read_jsonl, read_trees
from qlass.policy import Policy
from qlass.qnet import QNet, pairs_of, qnet_scores
from train_qnet import HELD_OUT

RUN = "runs/walkthrough"
STEPS = 8  # of an episode: six reach the goal from any start
STAGES = {  # few updates for the agent, so that it errs; small trees; many updates for QNet, since four trees are few
    "sft": ["--epochs", "6"],
    "build_trees": ["--depth", "2", "--width", "2", "--rollouts", "6", "--steps", str(STEPS)],
    "bellman": [],
    "train_qnet": ["--epochs", "40", "--batch", "16"],
    "q_search": ["--method", "greedy", "qlass", "-M", "4", "--max-steps", str(STEPS)],
}


@contextlib.contextmanager
def listening() -> Iterator[dict[str, list]]:
    """Whatever any Policy or QNet answers within the block: the digest of a request -> texts, or values."""
    said: dict[str, list] = {}
    sample, score = Policy.sample, QNet.score

    def heard_sample(self: Policy, requests: list[Sample]) -> list[list[Candidate]]:
        answers = sample(self, requests)
        said.update((name(r), [c.text for c in some]) for r, some in zip(requests, answers, strict=True))
        return answers

    def heard_score(self: QNet, requests: list[Score]) -> list[list[float]]:
        answers = score(self, requests)
        said.update((name(r), [round(q, 6) for q in some]) for r, some in zip(requests, answers, strict=True))
        return answers

    with mock.patch.object(Policy, "sample", heard_sample), mock.patch.object(QNet, "score", heard_score):
        yield said


def record_frozenlake(seed: int) -> list[dict]:
    """Run the five scripts on the 4x4 map; keep the most telling tree that QNet learnt from, and two episodes."""
    commands = []
    with tempfile.TemporaryDirectory() as place, listening() as said:
        run = Path(place) / RUN
        for stage, flags in STAGES.items():
            argv = [*LAKE, "--run", RUN, "--seed", str(seed), *flags]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                importlib.import_module(stage).main([str(run) if word == RUN else word for word in argv])
            command = {"command": f"python {stage}.py {' '.join(argv)}"}
            commands.append(command | {"printed": printed.getvalue().replace(f"{place}/", "")})
        about = json.loads(meta_path(run / "sft").read_text())
        policy = Policy.load(run / "sft")
        qnet = QNet.from_pretrained(run / "qnet")
        labelled = list(read_trees(run / "q_labels.jsonl"))
        results = list(read_jsonl(run / "results.jsonl"))
        env, settings = small_lake(), tree_settings(run, small_lake())

        def grown(tree: list[dict]) -> tuple[list[dict], list[Branch]]:
            return grow(env, tree[0]["task_id"], policy.chat.rendering, settings, Models(said))

        trained = [tree for i, tree in enumerate(labelled) if i % HELD_OUT]
        chosen = max(trained, key=lambda tree: telling(*grown(tree)))
        qnet_scores(qnet, [pairs_of(chosen)])
        task = most_different(results)
        return [
            {"part": "frozenlake", "kind": "run", "seed": seed, "commands": commands, "settings": settings}
            | {"steps": STEPS, "trees": len(labelled), **provenance(about)},
            {"part": "frozenlake", "kind": "tokenizer", **tokenizer_record(policy.chat)},
            *keep("frozenlake", env, policy.chat, settings, STEPS, chosen, task, said),
        ]


def record_webshop(run: Path) -> list[dict]:
    """Of a finished run: play the tasks of the trees that QNet was not trained on, greedily and guided, and keep the
    smallest tree of those where guidance gained."""
    if not (run / "qnet").exists() or not (run / "q_labels.jsonl").exists():
        raise UserError(f"{run}: no finished WebShop run; make one (RUN={run} bash runs/quickstart.sh) or name another")
    env = envs.make("webshop")
    settings = tree_settings(run, env)
    held_out = list(read_trees(run / "q_labels.jsonl"))[::HELD_OUT]
    about = json.loads(meta_path(run / "qnet").read_text())
    seed, ranked = about["arguments"]["seed"], about["held_out"]
    policy, qnet = Policy.load(run / "sft", seed=seed), QNet.from_pretrained(run / "qnet")
    with listening() as said:
        tasks = [tree[0]["task_id"] for tree in held_out]
        answers = {Sample: policy.sample, Score: qnet.score}
        results = []
        for method in (GREEDY, QLASS):
            episodes = (q_search.best_of(env.fork(), t, method, policy.chat) for t in tasks)
            played = drive(episodes, answers, env.side_by_side, in_order=True)
            results += [r | {"task_id": t, "method": method.name} for t, r in zip(tasks, played, strict=True)]
        rewards = {(r["method"], r["task_id"]): r["reward"] for r in results}
        gains = {t: rewards["qlass", t] - rewards["greedy", t] for t in tasks}
        better = [tree for tree in held_out if gains[tree[0]["task_id"]] > 0] or held_out
        chosen = min(better, key=len)
        task = chosen[0]["task_id"]
        grow(env, task, policy.chat.rendering, settings, policy)
        qnet_scores(qnet, [pairs_of(chosen)])
    tally = {
        "tasks": len(tasks), "better": sum(g > 0 for g in gains.values()), "worse": sum(g < 0 for g in gains.values()),
        **{m: round(statistics.mean(rewards[m, t] for t in tasks), 3) for m in ("greedy", "qlass")},
    }  # fmt: skip
    return [
        {"part": "webshop", "kind": "run", "seed": seed, "settings": settings, "steps": env.max_steps}
        | {
            "trees": about["trees"],
            "tally": tally,
            "held_out": ranked,
            "rendering": vars(policy.chat.rendering),
            **provenance(about),
        },
        *keep("webshop", env, policy.chat, settings, env.max_steps, chosen, task, said),
    ]


def keep(
    part: str, env: envs.TextEnv, chat: Chat, settings: dict, steps: int, labelled: list[dict], task: str, said: dict
) -> Iterator[dict]:
    """The lines for one tree and two episodes: what their models said, and a digest of what came of it."""
    models = Models(said)
    lines, _ = grow(env, labelled[0]["task_id"], chat.rendering, settings, models)
    tree = bellman.label(lines, "q", settings["gamma"])
    if essence(tree) != essence(labelled):
        raise UserError(f"task {labelled[0]['task_id']}: its tree comes out differently now; make the run again")
    qnet_scores(models, [pairs_of(tree)])
    about = {"part": part, "kind": "tree", "task_id": labelled[0]["task_id"]}
    yield about | {"outcome": digest(essence(tree)), "said": models.heard()}
    for method in (GREEDY, QLASS):
        models = Models(said)
        result = play(env, task, method, chat, steps, models)
        about = {"part": part, "kind": "episode", "task_id": task, "method": method.name}
        yield about | {"outcome": digest(result), "said": models.heard()}


def telling(tree: list[dict], branches: list[Branch]) -> int:
    """How much of what can happen in Algorithm 2 happens in a tree that is still small enough for a figure."""
    expert = 1 + [branch.by for branch in branches].index("expert")
    rewards = {node["reward"] > 0 for node in tree if node["done"] and node["branch"] != expert}
    made = {node["branch"] for node in tree[1:]}
    return sum([
        expert > 2,  # the first pass has several branches
        expert in made,
        rewards == {True, False},  # the agent won, and lost
        len(made) == len(branches),
        sum(node["parent_id"] == 0 for node in tree) > 1,
        len(tree) <= 24,
    ])  # fmt: skip


def most_different(results: list[dict]) -> str:
    """The task where QLASS gains most over greedy; among equals the one with most candidates to choose among."""
    greedy = {r["task_id"]: r["reward"] for r in results if r["method"] == "greedy"}
    guided = [r for r in results if r["method"] == "qlass"]
    return max(
        guided, key=lambda r: (r["reward"] - greedy[r["task_id"]], sum(len(s["candidates"]) for s in r["steps"]))
    )["task_id"]


def tree_settings(run: Path, env: envs.TextEnv) -> dict:
    used = json.loads(meta_path(run / "trees.jsonl").read_text())["arguments"]
    steps = used["steps"] or env.tree_steps
    gamma = json.loads(meta_path(run / "q_labels.jsonl").read_text())["arguments"]["gamma"]
    return {k: used[k] for k in ("depth", "width", "rollouts", "temperature")} | {"steps": steps, "gamma": gamma}


def provenance(meta: dict) -> dict:
    return {k: meta[k] for k in ("commit", "written", "python", "versions")}


def tokenizer_record(chat: Chat) -> dict:
    tokenizer = chat.tokenizer
    return {"rendering": vars(chat.rendering), "template": tokenizer.chat_template, "pad": tokenizer.pad_token,
            "end": tokenizer.eos_token, "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str())}  # fmt: skip
