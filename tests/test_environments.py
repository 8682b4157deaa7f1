"""What every environment keeps to, the order of tasks, and the example of docs/environment.md through all stages."""

import copy
import itertools
from collections import Counter

import gymnasium
import pytest
from fakes import FakeEnv
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

import build_trees
import envs
import sft
import train_qnet
from build_trees import Explorer
from docs.switches import Switches
from experiments import compare, drive_in_order
from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.chat import Rendering, uniforms
from qlass.files import read_jsonl

FLAG = "docs.switches:Switches"


@pytest.mark.parametrize("reward", [50, -1, 2.5, float("nan"), 0.5])
def test_a_reward_that_is_no_outcome_is_refused(reward):
    """Beyond [0, 1], not a number, or before the end."""
    env = FakeEnv()
    assert [env.outcome(r, done=True) for r in (0, 0.5, 1, True)] == [0.0, 0.5, 1.0, 1.0]
    with pytest.raises(UserError, match="fake: a step earned"):
        env.outcome(reward, done=reward != 0.5)


@pytest.mark.filterwarnings("ignore")  # of gymnasium's checks, on the texts of ScienceWorld
@pytest.mark.parametrize("name", [*envs.ENVIRONMENTS, FLAG])
def test_every_environment_keeps_what_envs_promises(name, monkeypatch):
    if name == "sciworld":
        pytest.importorskip("scienceworld")
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    env = envs.make(name, max_steps=None)
    check_env(env.fork(), skip_render_check=True)
    task = env.task_ids("train")[-1]
    _, info = env.reset(options={"task_id": task})
    offered = env.valid_actions()
    assert info["task_id"] == task and info["task"] and copy.deepcopy(info)["valid_actions"] == offered
    for handed_out in (info["valid_actions"], env.valid_actions(), env.split_ids("test")):
        handed_out.clear()
    assert env.valid_actions() == offered and env.split_ids("test")
    here, other = env.snapshot(), env.fork()
    other.step(offered[0])
    other.reset(options={"task_id": env.task_ids("train")[0]})
    assert env.valid_actions() == offered and (env.snapshot() == here or name == "frozenlake")  # that has its generator
    other.close()
    for _, action in env.expert(task):
        *_, over, _, info = env.step(action)
        if over:
            break
    assert over  # without a step limit too
    for split in ("nowhere", ""):
        with pytest.raises(envs.UserError):
            env.task_ids(split)
    with pytest.raises(envs.UserError, match="nowhere"):
        env.reset(options={"task_id": "nowhere"})
    env.instruct("Play.")
    env.reset(options={"task_id": task})
    assert env.fork().instruction == env.instruction == "Play."
    train, val, test = ({env.subject(task) for task in env.task_ids(split)} for split in ("train", "val", "test"))
    assert train and val and test and not (train & val or train & test or val & test)
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(5)}
    assert drawn <= set(env.task_ids("train"))  # without a task: one to train on
    env.close()


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake", FLAG])  # sciworld: its own test, of few steps
def test_actions_of_one_canonical_form_are_the_same_to_the_engine(name, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    env, merged = envs.make(name, max_steps=None), 0
    task = env.task_ids("train")[0]
    env.reset(options={"task_id": task})
    for _, played in [("", ""), *itertools.islice(env.expert(task), 2)]:
        env.step(played)
        here, offered = env.snapshot(), env.valid_actions()
        assert len({env.canonical(action) for action in offered}) == len(offered)
        for action in offered[:2]:
            spaced = action.replace(" ", "  "), f" {action} ", f"{action} x"
            for other in (action.upper(), action.title(), *spaced):
                if env.canonical(other) == env.canonical(action):
                    merged += 1
                    env.restore(here)
                    answer = env.step(action)[:4]
                    env.restore(here)
                    assert env.step(other)[:4] == answer, (action, other)
        env.restore(here)
    assert (merged > 0) == (name not in ("alfworld", FLAG))  # those read what stands there
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["WebShop", "ALFWorld", "SciWorld", "FrozenLake"])
def test_gymnasiums_vector_environments_show_what_each_alone_shows(name, mode, monkeypatch):
    if name == "SciWorld":
        pytest.importorskip("scienceworld")
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    alone = [gymnasium.make(f"envs:qlass/{name}-v0") for _ in range(2)]
    both = gymnasium.make_vec(f"envs:qlass/{name}-v0", num_envs=2, vectorization_mode=mode)
    expected = [env.reset(seed=seed) for seed, env in enumerate(alone)]
    texts, info = both.reset(seed=0)
    shown = []
    for _ in range(3):
        shown.append((texts, tuple(text for text, *_ in expected)))
        for key in ("task", "valid_actions"):
            assert [*info[key]] == [single[-1][key] for single in expected]
        actions = tuple(single[-1]["valid_actions"][-1] for single in expected)
        expected = [env.step(action) for env, action in zip(alone, actions, strict=True)]
        texts, *_, info = both.step(actions)
    assert all(theirs == ours for theirs, ours in shown) and len({texts for texts, _ in shown}) > 1  # none has changed
    both.close()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_every_stretch_holds_each_type_by_its_share(sizes, data):
    """Type t's tasks stand at (i + 1/2) / n_t: n_t x of them, rounded, below x, which is k / n within T / (2 n)."""
    tasks = [f"{kind}/{i}" for kind, size in enumerate(sizes) for i in range(size)]
    order = envs.fair_order(data.draw(st.permutations(tasks)), lambda task: task.split("/")[0])
    assert sorted(order) == sorted(tasks) and order == envs.fair_order(tasks, lambda task: task.split("/")[0])
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(tasks))] * 2)))
    for first, times in ((0, 1), (start, 2)):  # a prefix, any stretch
        found = Counter(task.split("/")[0] for task in order[first:end])
        for kind, size in enumerate(sizes):
            share = size / len(tasks)
            bound = times * (0.5 + share * len(sizes) / 2) + 1e-9
            assert abs(found[str(kind)] - share * (end - first)) <= bound


@pytest.mark.parametrize("name", ["webshop", "alfworld", "frozenlake"])
def test_the_splits_of_an_environment_are_in_this_order(name):
    env = envs.make(name)
    for split in ("train", "val", "test"):
        tasks = env.task_ids(split)
        assert tasks == envs.fair_order(env.split_ids(split), env.task_type) and len(set(tasks)) == len(tasks)


class Wrapped(Switches):
    """Around a simulator that all forks share and that each episode changes."""

    name, side_by_side = "wrapped", envs.TextEnv.side_by_side
    on = property(lambda self: self.simulator["on"], lambda self, lamps: self.simulator.update(on=lamps))

    def __init__(self):
        super().__init__()
        self.simulator = {}


def test_an_environment_that_does_not_say_otherwise_has_one_episode_open_at_a_time():
    def explore(env, task_id):
        return Explorer(env.fork(), task_id, Rendering(candidates="valid"), 2, max_rollouts=4).explore()

    def draw(request):
        noise = uniforms(request.n, *request.key)
        return [Candidate(request.valid[int(u * len(request.valid))], 1, 0.0) for u in noise]

    def trees(env):
        explored = (explore(env, task) for task in env.task_ids("train")[:4])
        roots = drive_in_order(explored, {Sample: lambda batch: list(map(draw, batch))}, env.side_by_side)
        return [[node.observation for node in root.subtree()] for root in roots]

    assert trees(Wrapped()) == trees(Switches())


def test_one_command_takes_it_through_all_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sft.UPDATES", 10)
    monkeypatch.setitem(sft.TINY, "epochs", 1)
    monkeypatch.setitem(train_qnet.TINY, "epochs", 1)
    monkeypatch.setitem(build_trees.DEFAULTS, "limit", 2)
    compare.main(["--env", FLAG, "--run", str(tmp_path), "--method", "all", "-M", "2", "--limit", "1"])
    made = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert len(made) == 4  # QNet, labels, trees, agent
    records = list(read_jsonl(tmp_path / "results.jsonl"))
    assert all(r["reward"] == 1 for r in records if r["method"] in ("expert", "oracle"))
    assert {"greedy", "qlass", "best_of_n"} <= {r["method"] for r in records}
    assert isinstance(envs.make(FLAG), Switches)
