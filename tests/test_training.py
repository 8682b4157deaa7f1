"""The two training loops' common part: order of the data, early stopping, what a stopped run resumes from."""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from fakes import dump
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_train_qnet import labelled_tree
from torch import nn
from torch.distributed.run import parse_args as torchrun

from qlass import UserError, loop
from qlass.files import read_jsonl
from qlass.loop import Training, cosine, finish, log_path, partial_folder, updates_of

# ------------------------------------------------------------------------------------------------------------ the order


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_each_example_once_in_updates_of_at_least_a_batch(sizes, batch, seed, epoch):
    plan = updates_of(sizes, batch, seed, epoch)
    assert sorted(i for update in plan for i in update) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in update) >= batch > sum(sizes[i] for i in update[:-1]) for update in plan[:-1])
    assert plan == updates_of(sizes, batch, seed, epoch)


def test_epochs_and_seeds_differ_in_their_order():
    plans = [updates_of([1] * 20, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])


# -------------------------------------------------------------------------------------------------------- a small loop


def arguments(folder: Path, **more) -> argparse.Namespace:
    options = {"out": folder / "model", "epochs": 6, "patience": 2, "batch": 3, "lr": 0.1, "seed": 0, "save_every": 2,
               "overwrite": False, "log": "jsonl"}  # fmt: skip
    return argparse.Namespace(**options | more)


class Stopped(Exception):
    pass


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))  # dropout: the random state counts too


def fit(
    args: argparse.Namespace, scores: list[float | None], stop: int | None = None, spoil: int | None = None, pause=0.0
):
    """Ten examples in updates of three; `scores` are the validation's. Raises Stopped before update `stop`."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    run = Training("small", model, optimizer, args, [1] * 10)
    weights = []  # after each epoch
    for epoch in run.epochs():
        for update in run.updates():
            if run.at.step == stop:
                raise Stopped
            loss = (model(data[update]) - 1).square().mean() * (float("nan") if run.at.step == spoil else 1)
            run.backward(loss, len(update))
            run.step()
            time.sleep(pause)
        weights.append([p.detach().clone() for p in model.parameters()])
        run.validated(scores[epoch], {} if scores[epoch] is None else {"score": scores[epoch]})
    figures = run.figures()
    assert figures.pop("seconds") >= pause * figures["steps"]  # also of a run that was stopped
    return list(model.parameters()), figures, weights


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_stops_when_validation_has_not_improved_and_keeps_the_best_epoch(tmp_path):
    final, figures, weights = fit(arguments(tmp_path), [1.0, 3.0, 2.0, 2.9, 9.0, 9.0])
    assert len(weights) == 4 and same(final, weights[1]) and not same(final, weights[3])
    assert figures["best_epoch"] == 2 and figures["steps"] == 16 and figures["tokens"] == 40
    assert [(e["epoch"], e["step"], e["score"]) for e in figures["curve"]] == [
        (1, 4, 1.0), (2, 8, 3.0), (3, 12, 2.0), (4, 16, 2.9),
    ]  # fmt: skip
    assert figures["loss"] == figures["curve"][1]["loss"]


def test_it_does_not_stop_while_validation_improves(tmp_path):
    final, figures, weights = fit(arguments(tmp_path), [1, 0, 2, 0, 3, 0])
    assert len(weights) == 6 and same(final, weights[4]) and figures["best_epoch"] == 5


def test_without_validation_all_epochs_run_and_the_last_one_counts(tmp_path):
    final, figures, weights = fit(arguments(tmp_path), [None] * 6)
    assert len(weights) == 6 and same(final, weights[5]) and figures["best_epoch"] == 6


# ---------------------------------------------------------------------------------------------- stopped, and run again


@pytest.mark.parametrize("stops", [(0,), (1, 3), (4, 5, 7), (2, 2, 9), (15,), (8, 12)])
def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(tmp_path, stops):
    scores = [1.0, 3.0, 2.0, 2.9, 9.0, 9.0]
    expected, figures, _ = fit(arguments(tmp_path / "whole"), scores)
    args = arguments(tmp_path / "parts", save_every=3)
    for stop in stops:
        with pytest.raises(Stopped):
            fit(args, scores, stop, pause=0.01)
    final, again, _ = fit(args, scores, pause=0.01)
    assert same(final, expected) and again == figures
    final, again, weights = fit(args, scores)  # stopped between the last epoch and the end of the stage
    assert same(final, expected) and again == figures and not weights
    finish(args.out)
    assert not partial_folder(args.out).exists()


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(tmp_path):
    """SIGKILL at any moment, three times: between updates, in one, while a checkpoint is written."""
    scores, moments = [1.0, 3.0, 2.0, 2.9, 9.0, 9.0], random.Random(0)
    expected, figures, _ = fit(arguments(tmp_path / "whole"), scores)
    args = arguments(tmp_path / "parts", save_every=1)
    for _ in range(3):
        child = multiprocessing.get_context("fork").Process(target=fit, args=(args, scores), kwargs={"pause": 0.02})
        child.start()
        time.sleep(moments.uniform(0.02, 0.15))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    final, again, _ = fit(args, scores)
    assert same(final, expected) and again == figures


def test_another_run_does_not_continue_this_one(tmp_path):
    with pytest.raises(Stopped):
        fit(arguments(tmp_path), [1.0] * 6, 5)
    with pytest.raises(UserError, match=r"begun with --lr 0.1, not 0.2"):
        fit(arguments(tmp_path, lr=0.2), [1.0] * 6)
    with pytest.raises(UserError, match=r"begun with other examples"):
        Training("small", small(), torch.optim.SGD(small().parameters()), arguments(tmp_path), [1] * 10, [[1, 2]])
    fit(arguments(tmp_path, save_every=9, micro_tokens=5), [1.0] * 6)  # what changes no weight may differ


def test_a_checkpoint_takes_its_name_when_it_is_complete(tmp_path, monkeypatch):
    save = torch.save

    def full(content, path):
        save(content, path)
        raise OSError("No space left on device")

    args = arguments(tmp_path)
    with pytest.raises(Stopped):
        fit(args, [1.0] * 6, 5)
    before = (partial_folder(args.out) / "last.pt").read_bytes()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left on device: make room"):
        fit(args, [1.0] * 6)
    assert (partial_folder(args.out) / "last.pt").read_bytes() == before


def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_weights(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(UserError, match=r"small: stopped at update 6: loss nan.*lower --lr"):
        fit(args, [1.0] * 6, spoil=5)
    saved = torch.load(partial_folder(args.out) / "last.pt", weights_only=True)
    assert saved["progress"]["step"] == 4 and all(p.isfinite().all() for p in saved["weights"].values())


@pytest.mark.parametrize("updates", [60, 15])
def test_a_loss_that_explodes_stops_the_run(tmp_path, updates):
    args = arguments(tmp_path, batch=1)
    model = small()
    run = Training("small", model, torch.optim.SGD(model.parameters(), lr=0.0), args, [1] * updates)
    done = 0
    with pytest.raises(UserError, match="loss 51"):
        for _ in run.epochs():
            for _ in run.updates():
                loss = 0 * model(torch.ones(1, 4)).sum() + (5.0 if done < 20 else 51.0)
                run.backward(loss, 1)
                run.step()  # a single bad batch is none: the mean of twenty counts
                done += 1
            run.validated(None, {})
    assert done == 39


# ------------------------------------------------------------------------------------------------------------- the log


def test_the_log_of_a_stopped_run_is_that_of_one_that_was_not(tmp_path):
    scores, logs = [1.0, 3.0, 2.0, 2.9, 9.0, 9.0], []
    for name, stops in (("whole", []), ("parts", [1, 7])):
        args = arguments(tmp_path / name, save_every=3)
        for stop in stops:
            with pytest.raises(Stopped):
                fit(args, scores, stop)
        fit(args, scores)
        lines = list(read_jsonl(log_path(args.out)))
        assert all(line.pop("tokens_per_second", 1) > 0 for line in lines)
        logs.append(lines)
    assert logs[0] == logs[1] and [line["step"] for line in logs[0] if "loss" in line] == list(range(1, 17))
    assert logs[0][3]["lr"] == pytest.approx(0.1 * cosine(3, 24))
    assert [line["score"] for line in logs[0] if "epoch" in line] == scores[:4]


def test_off_a_terminal_a_line_every_half_minute(tmp_path, capsys, monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr("qlass.loop.time.monotonic", lambda: next(clock))
    fit(arguments(tmp_path), [1.0] * 6)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("small:")]
    assert said[0].startswith("small: 3/24 updates, loss ") and said[0].endswith("4 min left at most")
    assert len(said) == 4


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_log_that_is_not_installed_says_so(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("qlass.loop.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        fit(arguments(tmp_path, log=kind), [1.0] * 6)


# --------------------------------------------------------------------------------------------------------- the stages


@pytest.mark.parametrize("stage", ["sft", "train_qnet"])
def test_a_stopped_stage_ends_with_the_files_of_one_that_was_not(tmp_path, agent, fake_world, monkeypatch, stage):
    """The command given again after two stops."""
    module, step, stops = importlib.import_module(stage), Training.step, []

    def stopping(run: Training) -> None:
        if stops and run.at.step == stops[0]:
            stops.pop(0)
            raise Stopped
        step(run)

    monkeypatch.setattr(Training, "step", stopping)
    labels = tmp_path / "labels.jsonl"
    labels.write_text(dump([node for i in range(6) for node in labelled_tree(f"train{i}")]))
    argv = ["--env", "frozenlake", "--run", str(tmp_path), "--epochs", "3", "--save-every", "2", "--batch", "4"]
    argv += ["--n-expert", "6"] if stage == "sft" else ["--sft", str(agent), "--labels", str(labels)]
    made = {}
    for name, when in (("whole", []), ("parts", [1, 4])):
        stops[:] = when
        for _ in when:
            with pytest.raises(Stopped):
                module.main([*argv, "--out", str(tmp_path / name)])
        module.main([*argv, "--out", str(tmp_path / name)])
        weights = sorted((tmp_path / name).glob("*.safetensors"))
        made[name] = (
            [f.read_bytes() for f in weights],
            json.loads((tmp_path / f"{name}.meta.json").read_text())["curve"],
        )
        assert not partial_folder(tmp_path / name).exists()
    assert made["whole"] == made["parts"]


# ----------------------------------------------------------------------------------------------- several processes


def launch(module, argv: list[str], count: int, code: int = 0) -> None:
    """As `accelerate launch` and `torchrun` do: the same command in each process, its rank in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def process(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        module.main(argv)

    started = [multiprocessing.get_context("fork").Process(target=process, args=(rank,)) for rank in range(count)]
    for one in started:
        one.start()
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [code] * count


@pytest.fixture
def small_run(tmp_path, agent, fake_world):
    """The arguments of a stage's small run, and what it made."""
    (tmp_path / "labels.jsonl").write_text(dump([node for i in range(5) for node in labelled_tree(f"train{i}")]))

    def argv(stage: str, name: str) -> list[str]:
        inputs = {"sft": ["--n-expert", "5"],
                  "train_qnet": ["--sft", str(agent), "--labels", str(tmp_path / "labels.jsonl")]}  # fmt: skip
        return ["--env", "frozenlake", "--run", str(tmp_path), "--out", str(tmp_path / name), "--epochs", "2",
                "--micro-tokens", "40", "--batch", "4", "--save-every", "1", *inputs[stage]]  # fmt: skip

    def made(name: str) -> tuple[dict, dict]:
        weights = {k: v for file in sorted((tmp_path / name).glob("*.safetensors")) for k, v in load_file(file).items()}
        assert not partial_folder(tmp_path / name).exists()
        return json.loads((tmp_path / f"{name}.meta.json").read_text()), weights

    return argv, made


def test_what_launchers_ask_for(monkeypatch):
    given = torchrun(["--nproc-per-node", "8", "--", "train_qnet.py", "--run", "x"])  # without -- an ambiguous --run
    assert (given.training_script, given.training_script_args) == ("train_qnet.py", ["--run", "x"])
    assert loop.start(True) is False  # one process holds all
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert loop.start() is False and loop.start(True) is True
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert loop.start() is True
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="DeepSpeed is not supported"):
        loop.start()


def assert_equal_runs(one: tuple[dict, dict], two: tuple[dict, dict]) -> None:
    (about, weights), (again, others) = one, two
    assert [e["loss"] for e in about["curve"]] == pytest.approx([e["loss"] for e in again["curve"]], rel=1e-4)
    assert about["tokens"] == again["tokens"] and weights.keys() == others.keys()
    for name, w in weights.items():
        torch.testing.assert_close(others[name], w, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("stage", ["sft", "train_qnet"])
def test_two_processes_train_what_one_does(small_run, stage, divided):
    """Each with the whole model, or with half of the weights, gradients and moments."""
    module, (argv, made) = importlib.import_module(stage), small_run
    module.main(argv(stage, "by-1"))
    launch(module, [*argv(stage, "by-2"), *["--fsdp"] * divided], 2)
    assert_equal_runs(made("by-1"), made("by-2"))


@pytest.mark.parametrize(("stage", "begun"), [("sft", 1), ("train_qnet", 2)])
def test_a_divided_training_resumes_what_one_process_began_and_the_reverse(small_run, monkeypatch, stage, begun):
    module, (argv, made), step = importlib.import_module(stage), small_run, Training.step

    def stopping(run: Training) -> None:
        if run.at.step == 2:
            parts = sum(loop.local(p).numel() for p in run.model.parameters())
            assert begun * parts == pytest.approx(sum(p.numel() for p in run.model.parameters()), rel=0.05)
            raise SystemExit(7)
        step(run)

    module.main(argv(stage, "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stopping)
        launch(module, [*argv(stage, "parts"), "--fsdp"], begun, code=7)
    launch(module, [*argv(stage, "parts"), "--fsdp"], 3 - begun)
    assert_equal_runs(made("whole"), made("parts"))
