"""The originals' own classes on our engines: against their recordings, against alfworld itself, and on bundled data."""

import json
import pickle
import random
import re
import shutil
import tarfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from test_webshop import SHARED, goals_file, lines, real_shop, recorded

import envs
from data import make_alfworld, make_webshop
from environments.webshop import catalogue
from integrations.alfworld import AlfredTWEnv, get_environment
from integrations.trl import games
from integrations.webshop import WebAgentTextEnv
from qlass import UserError

ALFWORLD = SHARED.parent / "alfworld"


def config(folder, max_steps=50, task_types=(1, 2, 3, 4, 5, 6), games=-1, randomization=False):
    splits = {"data_path": "train", "eval_id_data_path": "valid_seen", "eval_ood_data_path": "valid_unseen"}
    paths = {key: f"{folder}/json_2.1.1/{split}" for key, split in splits.items()}
    env = {"goal_desc_human_anns_prob": 0, "task_types": list(task_types), "domain_randomization": randomization}
    return {
        "dataset": paths | {"num_train_games": games, "num_eval_games": games},
        "env": env | {"expert_type": "handcoded"},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": max_steps}},
    }


@recorded
@pytest.mark.parametrize("grammar", ["new", "old"])
def test_recorded_walks_through_alfworlds_class_and_ours(grammar, tmp_path):
    """The engine's own text and, in ETO's layout, the one without banner and "You arrive at loc 5."."""
    walks = [walk for walk in lines(ALFWORLD / "golden.jsonl.gz") if walk["grammar"] == grammar]
    wanted = {f"json_2.1.1/{walk['game']}" for walk in walks}
    with tarfile.open(ALFWORLD / f"games_{grammar}_grammar.tar.xz") as archive:
        archive.extractall(tmp_path, (member for member in archive if member.name in wanted), filter="data")
    ours, steps = envs.make("alfworld", data=tmp_path, max_steps=None), 0
    for walk in walks:
        settings = config(tmp_path)
        settings["dataset"]["data_path"] = f"{tmp_path}/json_2.1.1/{Path(walk['game']).parent}"
        env = AlfredTWEnv(settings).init_env(batch_size=1)
        (observation,), infos = env.reset()
        assert (observation, infos["admissible_commands"]) == (walk["first"], [walk["admissible"]])
        assert (infos["won"], infos["extra.gamefile"]) == ([False], [f"{tmp_path}/json_2.1.1/{walk['game']}"])
        text, info = ours.reset(options={"task_id": walk["game"].removesuffix("/game.tw-pddl")})
        assert (info["feedback"], info["admissible_commands"]) == (walk["first"], walk["admissible"])
        assert text == walk["first"].split("\n\n", 1)[1] and f"Your task is to: {info['task']}" in text
        for step in walk["steps"]:
            (observation,), scores, dones, infos = env.step([step["action"]])
            assert observation.strip() == step["observation"]
            assert (scores, dones, infos["won"]) == ((step["reward"],), (step["done"],), [step["won"]])
            assert infos["admissible_commands"] == [step["admissible"]]
            text, reward, terminated, _, info = ours.step(step["action"])
            assert text == re.sub(r"You arrive at loc \d+\. ", "", step["observation"])
            assert (info["feedback"], info["admissible_commands"]) == (observation, step["admissible"])
            assert (reward, terminated, info["won"]) == (step["reward"], step["done"], step["won"])
            steps += 1
    assert steps == {"new": 1022, "old": 572}[grammar]


def test_side_by_side_with_alfworlds_class(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # else alfworld sets it for all that comes later
    pytest.importorskip("alfworld", reason="pip install -r requirements-alfworld.txt")
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv as Original

    folder = make_alfworld.write(tmp_path / "games", seed=5, train=2, full=True)
    settings, rng = config(folder, max_steps=3), random.Random(0)
    games = [kind(settings, "train") for kind in (AlfredTWEnv, Original)]
    ours, theirs = (game.init_env(batch_size=2) for game in games)
    for number in range(4):  # more than there are games: the second round has another order
        if number == 3:
            assert ours.seed(7) == theirs.seed(7)
        first = ours.reset()
        assert first == theirs.reset()
        commands = first[1]["admissible_commands"]
        for other in ("help", "dance", "look", "look"):  # beyond the limit, which repeats the last answer
            actions = [rng.choice([*offered, other, other]) for offered in commands]
            answer = ours.step(actions)
            assert answer == theirs.step(actions)
            commands = answer[3]["admissible_commands"]
        assert answer[2] == (True, True)


def test_games_of_a_split_in_the_order_of_the_seed(made):
    games = get_environment("AlfredTWEnv")(config(made, games=9))
    env = games.init_env(batch_size=3)
    env.reset()
    assert env.seed(1) == [1] and env.skip(3) is None
    order = list(games.game_files)  # from the beginning again
    np.random.RandomState(1).shuffle(order)
    assert env.reset()[1]["extra.gamefile"] == order[3:6]
    every, clean = (AlfredTWEnv(config(made, task_types=types)).game_files for types in (range(1, 7), [3]))
    assert clean == [path for path in every if "pick_clean" in path] != []


def test_what_alfworlds_class_leaves_out_or_refuses(made, tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    shutil.copytree(made / "json_2.1.1/train", tmp_path / "json_2.1.1/train")
    few = AlfredTWEnv(config(tmp_path))
    file = Path(few.game_files[0])
    file.write_text(file.read_text().replace('"solvable": true', '"solvable": false'))
    assert str(file) not in AlfredTWEnv(config(tmp_path)).game_files
    with pytest.raises(UserError, match="domain_randomization"):
        AlfredTWEnv(config(tmp_path, randomization=True))
    with pytest.raises(UserError, match=f"{tmp_path}/json_2.1.1/valid_seen: no games of the types"):
        AlfredTWEnv(config("$ALFWORLD_DATA"), "eval_in_distribution")


def original_shop(human):
    files = {"goals": goals_file(human), "title_nouns": SHARED / "title_nouns_standin.json.gz"}
    return WebAgentTextEnv("text", file_path=SHARED, num_products=1000, human_goals=human, **files)


@recorded
def test_recorded_pages_through_webshops_class_and_ours():
    shops, pages = {human: (original_shop(human), real_shop(human)) for human in (False, True)}, 0
    for number, episode in enumerate(lines(SHARED / "golden.jsonl.gz")):
        (env, other), goal = shops[episode["human"]], episode["goal"]
        env.session_prefix = f"{number}-"
        observation, info = env.reset(session=episode["goal_idx"])
        text, told = other.reset(options={"task_id": str(episode["goal_idx"])})
        over = False
        assert other.goal == goal
        steps = [episode["reset"] | {"action": None}, *episode["steps"]]
        for step in steps:
            reward, done = 0, False
            if step["action"] is not None:
                observation, reward, done, info = env.step(step["action"])
                assert (reward, done) == (step["reward"], step["done"])
                if not over:  # there ours repeats its last answer
                    text, *answer, told = other.step(step["action"])
                    assert answer == [reward, done, False]
            assert (observation, info, env.observation) == (step["obs"], None, step["obs"])
            assert over or (text, told["clickables"]) == (step["obs"], step["clickables"])
            session = env.server.user_sessions[env.session]
            for key, first in (("options", {}), ("page", None), ("asin", None)):
                assert session[key] == step.get(f"session_{key}", first)
            if done:
                assert session["verbose_info"] == pytest.approx(step["reward_info"]) and session["done"]
                assert over or told["reward_details"].items() >= step["reward_info"].items()
            over |= done
            available = {"has_search_bar": step["has_search_bar"], "clickables": step["clickables"]}
            assert env.get_available_actions() == available
            if not step["obs"].startswith("Thank you"):
                words = goal["instruction_text"]
                assert env.get_instruction_text().replace(words, f"\n{words}\n") in step["obs_rich"]
            pages += 1
        assert env.server.goals[episode["goal_idx"]] == goal | {"weight": pytest.approx(goal["weight"], rel=1e-9)}
        assert session["goal"] == env.server.goals[episode["goal_idx"]]
    assert pages == 359 + 3097
    for human, (env, _) in shops.items():
        assert env.server.cum_weights[-1] == catalogue.read_json(goals_file(human))["cum_weights_last"]


def test_the_file_of_products_that_is_named_is_read_or_the_first_of_it(tmp_path):
    made = Path(make_webshop.ensure(0, make_webshop.GENERATED))
    products = json.loads((made / "items_shuffle.json").read_text())
    (tmp_path / "items_shuffle.json").write_text(json.dumps(products[:60]))
    for name in ("items_ins_v2", "items_human_ins"):
        (tmp_path / f"{name}.json").symlink_to(made / f"{name}.json")
    path = tmp_path / "items_shuffle.json"
    for most in (60, 30):
        env = WebAgentTextEnv("text", file_path=path, num_products=most)
        assert len(env.server.shop.products) == most
    with pytest.raises(UserError, match=r"items_shuffle_2.json: found none of"):
        WebAgentTextEnv("text", file_path=tmp_path / "items_shuffle_2.json")


def test_default_arguments_and_the_id_of_the_original():
    env = gymnasium.make(
        "WebAgentTextEnv-v0",
        observation_mode="text",
        filter_goals=None,
        limit_goals=-1,
        num_products=None,
        human_goals=0,
        show_attrs=False,
        get_image=0,
        num_prev_obs=0,
        num_prev_actions=0,
        session="x",
        session_prefix=None,
    )
    first, info = env.reset(5, instruction_text="buy it")
    assert "buy it" not in first and info is None and env.instruction_text == "buy it"
    assert env.reset(5)[0] == first and env.instruction_text == env.get_instruction_text()
    assert len(env.step("search[shirt]")) == 4
    asin = env.get_available_actions()["clickables"][2]  # behind two buttons
    for action in (f"click[{asin}]", "click[buy now]"):
        _, reward, done, _ = env.step(action)
    session = env.server.user_sessions["5"]
    assert done and session["done"] and session["reward"] == reward and session["asin"] == asin.upper()
    env.reset(5)
    assert session["done"] and session["asin"] is None  # as the original keeps it


def test_a_session_keeps_its_goal():
    env = WebAgentTextEnv("text")
    for name, number in ((5, 5), (np.int64(6), 6), (5, 5), ("5", 5)):
        text, _ = env.reset(session=name)
        assert env.server.goals[number]["instruction_text"] in text
    other = WebAgentTextEnv("text", server=env.server, session_prefix="x")
    assert env.reset(session=7) == other.reset(session=7) and other.session == "x7"
    assert other.reset(session="5")[0] != text  # x5 is a new name

    with pytest.raises(UserError, match="observation_mode='html' is not supported"):
        WebAgentTextEnv()  # the original's default


def test_the_doors_pickle_and_go_on_as_before(made):
    shop, batch = WebAgentTextEnv("text"), AlfredTWEnv(config(made, games=9)).init_env(batch_size=2)
    batch.reset()
    shop.step("search[shirt]")
    steps = (shop, "click[next >]", {"session": 7}), (batch, ["look", "inventory"], {})
    for door, action, reset in steps:
        twin = pickle.loads(pickle.dumps(door))
        assert twin.step(action) == door.step(action) and twin.reset(**reset) == door.reset(**reset)
    factory = pickle.loads(pickle.dumps(games("alfworld", data=made)))
    with pytest.raises(ValueError, match="no episode has begun: reset comes first"):
        factory().act("look")
