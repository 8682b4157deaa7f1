"""The training loops' common part: order of the data, early stopping, states and what resumes from them, processes."""

import argparse
import importlib
import json
import multiprocessing
import os
import socket
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType
from fakes import dump, training_settings
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_train_qnet import labelled_tree
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qlass import UserError, training
from qlass.files import read_jsonl
from qlass.training import Progress, begin, cosine, resume_folder, updates_of

ROOT = Path(__file__).parents[1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_each_example_once_in_updates_of_at_least_a_batch(sizes, batch, seed, epoch):
    plan = updates_of(sizes, batch, seed, epoch)
    assert sorted(i for update in plan for i in update) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in update) >= batch > sum(sizes[i] for i in update[:-1]) for update in plan[:-1])
    assert plan == updates_of(sizes, batch, seed, epoch)
    assert updates_of([1] * 20, 4, seed, epoch) != updates_of([1] * 20, 4, seed, epoch + 1)


SCORES = [1.0, 3.0, 2.0, 2.9, 9.0, 9.0]


def arguments(folder: Path, **more) -> argparse.Namespace:
    folder.mkdir(exist_ok=True)
    return training_settings(out=folder / "model", batch=3, lr=0.1, **{"save_every": 2, **more})


class Stopped(Exception):
    pass


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))  # dropout: the random state counts too


def fit(args: argparse.Namespace, scores: list[float | None], stop: int | None = None, spoil: int | None = None):
    """Ten examples in updates of three; `scores` are the validation's. Raises Stopped before update `stop`."""
    model = small()
    data = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    progress = Progress(model, args, [1] * 10)
    accelerator, optimizer = progress.accelerator, progress.optimizer
    weights = []  # after each epoch
    while not progress.finished:
        for update in progress.updates():
            if progress.step == stop:
                raise Stopped
            loss = (model(data[update]) - 1).square().mean() * (float("nan") if progress.step == spoil else 1)
            accelerator.backward(loss)
            total = progress.total(loss.item(), accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.param_groups[0]["lr"] = args.lr * cosine(progress.step, progress.steps)
            optimizer.step()
            optimizer.zero_grad()
            progress.end_update(total, tokens=len(update))
        weights.append([p.detach().clone() for p in model.parameters()])
        score = scores[len(progress.curve)]
        progress.end_epoch(None if score is None else -score, score=score)
    figures = progress.end()
    assert figures.pop("seconds") > 0
    return list(model.parameters()), figures, weights


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("scores", "epochs", "best"), [(SCORES, 4, 2), ([1, 0, 2, 0, 3, 0], 6, 5), ([None] * 6, 6, 6)])
def test_it_stops_when_validation_has_not_improved_and_keeps_the_best_epoch(tmp_path, scores, epochs, best):
    final, figures, weights = fit(arguments(tmp_path), scores)
    assert len(weights) == epochs and same(final, weights[best - 1]) and figures["best_epoch"] == best
    assert (figures["steps"], figures["tokens"]) == (4 * epochs, 10 * epochs)
    assert [(e["epoch"], e["score"]) for e in figures["curve"]] == list(enumerate(scores[:epochs], 1))
    assert figures["loss"] == figures["curve"][best - 1]["loss"]


@pytest.mark.parametrize("stops", [(0,), (4, 5, 7), (2, 2, 9), (15,)])
def test_a_stopped_run_ends_with_the_weights_and_the_log_of_one_that_was_not(tmp_path, stops):
    expected, figures, _ = fit(arguments(tmp_path / "one"), SCORES)
    args = arguments(tmp_path / "parts", save_every=3)
    for stop in stops:
        with pytest.raises(Stopped):
            fit(args, SCORES, stop)
    final, again, _ = fit(args, SCORES)
    assert same(final, expected) and again == figures
    final, again, weights = fit(args, SCORES)  # stopped between the last epoch and the end of the stage
    assert same(final, expected) and again == figures and not weights
    logs = [list(read_jsonl(tmp_path / name / "model.log.jsonl")) for name in ("one", "parts")]
    assert all(line.pop("seconds") > 0 for log in logs for line in log) and logs[0] == logs[1]
    assert [line["step"] for line in logs[0] if "lr" in line] == list(range(1, 17))
    assert logs[0][3]["lr"] == pytest.approx(0.1 * cosine(3, 24))
    assert [line["score"] for line in logs[0] if "epoch" in line] == SCORES[:4]


def stopped(args: argparse.Namespace) -> Path:
    """A run that was stopped at its sixth update: its last state."""
    with pytest.raises(Stopped):
        fit(args, [1.0] * 6, 5)
    (state,) = resume_folder(args.out).glob("state-00000004.pt")
    return state


def test_another_run_does_not_continue_this_one(tmp_path):
    args, data = arguments(tmp_path), tmp_path / "data"
    data.write_text("examples")

    def again(**more) -> bool:
        return begin(argparse.Namespace(**vars(args) | more), [data])

    assert again()
    stopped(args)
    assert again(save_every=9, micro_tokens=5)  # what changes no weight may differ
    with pytest.raises(UserError, match=r"begun with --lr 0.1, not 0.2"):
        again(lr=0.2)
    data.write_text("others")
    with pytest.raises(UserError, match="data, which has changed since"):
        again()
    assert again(overwrite=True) and not any(resume_folder(args.out).iterdir())


def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_weights(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(UserError, match=r"update 6: loss nan.*lower --lr than 0\.1"):
        fit(args, [1.0] * 6, spoil=5)
    weights = torch.load(resume_folder(args.out) / "state-00000004.pt", weights_only=True)["weights"]
    assert weights and all(p.isfinite().all() for p in weights.values())


@pytest.fixture
def small_run(tmp_path, agent, fake_world):
    """The arguments of a stage's small run, and what it wrote."""
    (tmp_path / "labels.jsonl").write_text(dump([node for i in range(5) for node in labelled_tree(f"train{i}")]))

    def argv(stage: str, name: str) -> list[str]:
        inputs = {
            "sft": ["--n-expert", "5"],
            "train_qnet": ["--sft", str(agent), "--labels", str(tmp_path / "labels.jsonl"), "--max-tokens", "40"],
        }
        return ["--env", "frozenlake", "--run", str(tmp_path), "--out", str(tmp_path / name), "--epochs", "2",
                "--micro-tokens", "40", "--batch", "4", "--save-every", "1", *inputs[stage]]  # fmt: skip

    def written(name: str) -> tuple[dict, dict]:
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert not resume_folder(tmp_path / name).exists()
        weights = {name: w for file in files for name, w in load_file(file).items()}
        return json.loads((tmp_path / f"{name}.meta.json").read_text()), weights

    return argv, written


def divide() -> None:
    """FSDP in this process: Accelerate divides a model among GPUs alone, so it is told that the processes have some."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    begin = accelerate.PartialState.__init__

    def on_gpus(state: accelerate.PartialState, **options) -> None:
        begin(state, **options)
        state.distributed_type = DistributedType.MULTI_GPU

    accelerate.PartialState.__init__ = on_gpus


def launch(module, argv: list[str], count: int, code: int = 0, fsdp: bool = False) -> None:
    """As torchrun does: the same command in each process, its rank in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def process(rank: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # of this test's own process
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if fsdp:
            divide()
        module.main(argv)

    processes = [multiprocessing.get_context("fork").Process(target=process, args=(rank,)) for rank in range(count)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
    assert [one.exitcode for one in processes] == [code] * count


@pytest.mark.parametrize(
    ("stage", "flags", "fsdp"),
    [("sft", [], False), ("train_qnet", [], False), ("train_qnet", ["--lora", "2"], True)],
)
def test_two_processes_share_the_work_and_train_what_one_does(small_run, tmp_path, monkeypatch, stage, flags, fsdp):
    """Also where they are stopped and started again."""
    module, (argv, written) = importlib.import_module(stage), small_run
    module.main([*argv(stage, "by-1"), *flags])
    share, end_update = Progress.share, Progress.end_update

    def counted(progress, groups):
        for group, weight in share(progress, groups):
            with open(tmp_path / f"process-{progress.accelerator.process_index}", "a") as file:
                file.write("x" * (weight > 0))
            yield group, weight

    def stopping(progress: Progress, *update, **counts) -> None:
        units = [module for module in progress.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) > 1 if fsdp else not units  # its layers, and the rest
        end_update(progress, *update, **counts)
        if progress.step == 3:
            raise SystemExit(7)

    monkeypatch.setattr(Progress, "share", counted)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "end_update", stopping)
        launch(module, [*argv(stage, "by-2"), *flags], 2, code=7, fsdp=fsdp)
    launch(module, [*argv(stage, "by-2"), *flags], 2, fsdp=fsdp)
    shares = [len((tmp_path / f"process-{rank}").read_text()) for rank in range(2)]
    assert 0 < shares[1] <= shares[0] < 2 * sum(shares) / 3
    (metadata, weights), (again, others) = written("by-1"), written("by-2")
    assert [e["loss"] for e in metadata["curve"]] == pytest.approx([e["loss"] for e in again["curve"]], rel=1e-4)
    assert metadata["tokens"] == again["tokens"] and weights.keys() == others.keys()
    for name, w in weights.items():
        torch.testing.assert_close(others[name], w, atol=1e-4, rtol=1e-3)


def test_processes_that_do_not_see_one_another_are_refused(tmp_path, monkeypatch):
    accelerate.PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start them by torchrun"), training.processes(tmp_path / "out", None):
        pass


def test_a_validation_that_is_no_number_is_not_written(tmp_path):
    with pytest.raises(UserError, match="validation loss nan"):
        fit(arguments(tmp_path), [float("nan")] * 6)


def test_variables_of_the_shell_do_not_divide_the_gradients(tmp_path, monkeypatch):
    expected, *_ = fit(arguments(tmp_path / "one"), SCORES)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    final, *_ = fit(arguments(tmp_path / "two"), SCORES)
    assert same(final, expected)
