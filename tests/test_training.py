"""The training loops' common part: order of the data, early stopping, states and what resumes from them, processes."""

import dataclasses
import importlib
import json
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fakes import FakeEnv, dump, fork, free_port, labelled_tree, settings_of, tiny_lm, word_chat
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sft
from qlass import UserError, device, models
from qlass.demonstrations import demonstrate
from qlass.files import meta_of, read_jsonl
from qlass.training import Training, updates_of


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_each_example_once_in_updates_of_at_least_a_batch(sizes, batch, seed, epoch):
    plan = updates_of(sizes, batch, seed, epoch)
    assert sorted(i for update in plan for i in update) == list(range(len(sizes)))
    for update in plan[:-1]:
        total = sum(sizes[i] for i in update)
        assert total >= batch > total - sizes[update[-1]]
    assert updates_of([1] * 20, 4, seed, epoch) != updates_of([1] * 20, 4, seed, epoch + 1)


LOSSES = [9.0, 7.0, 8.0, 7.1, 1.0, 1.0]
CHAT = word_chat()
EXAMPLES = [sft.Example([3, token, 1], [sft.NO_TARGET, token, 1]) for token in range(5, 15)]
PAPER = settings_of(sft, "--preset", "paper", "--run", "none")
SETTINGS = dataclasses.replace(PAPER, batch=3, lr=0.01, epochs=6, save_every=2)


def test_an_update_is_clipped_to_norm_1_and_has_its_learning_rate(tmp_path):
    log, model = Training(tmp_path / "model", SETTINGS, {}, {}), nn.Linear(2, 1)
    log.resume(model, models.adamw([(model, SETTINGS.lr)], "adamw"), sizes=[1] * 30)
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 5.0)
    assert log.reduce(7.0) == 7.0
    assert torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm() == pytest.approx(1, rel=1e-4)
    assert log.optimizer.param_groups[0]["lr"] == SETTINGS.lr / 2  # the first of two updates of warm-up


def test_the_loss_of_an_update_is_the_mean_over_what_the_agent_wrote(tmp_path):
    """Not over examples, whatever their lengths."""
    examples = [*EXAMPLES[:2], sft.Example([3, 5, 6, 7, 1], [sft.NO_TARGET, 5, 6, 7, 1])]
    log, model = Training(tmp_path / "model", SETTINGS, {}, {}), tiny_lm(CHAT)
    expected = sft.sft_loss(model, examples).item() / (2 + 2 + 4)
    sft.train(model, examples, [], dataclasses.replace(SETTINGS, epochs=1), log)
    assert log.lines[0]["loss"] == pytest.approx(expected, rel=1e-4)


class Stopped(Exception):
    pass


def fit(folder: Path, losses: list, stop: int | None = None, spoil=lambda loss: loss, **more):
    """Clone ten examples in updates of three; `losses` are the validation's. Raises Stopped before update `stop`.
    spoil: what the fifth update's loss becomes."""
    folder.mkdir(exist_ok=True)
    config = dataclasses.replace(SETTINGS, **more)
    log = Training(folder / "model", config, {}, {})
    model = tiny_lm(CHAT, attention_dropout=0.5)  # the random state counts too
    weights = []  # after each epoch

    def loss_of(model: nn.Module, portion: list) -> torch.Tensor:
        if log.step == stop:
            raise Stopped
        loss = sft.sft_loss(model, portion)
        return spoil(loss) if log.step == 4 else loss

    def validate(model: nn.Module, *_: object) -> float | None:
        weights.append([p.detach().clone() for p in model.parameters()])
        return losses[len(log.curve)]

    with mock.patch("sft.validate", validate):
        sft.train(model, EXAMPLES, [], config, log, loss_of)
        log.load_best()
    figures = {"curve": log.curve, "best_epoch": log.best_epoch, "steps": log.step}
    return list(model.parameters()), figures, weights


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("losses", "epochs", "best"), [(LOSSES, 4, 2), ([3, 4, 2, 4, 1, 4], 6, 5), ([None] * 6, 6, 6)])
def test_it_stops_when_validation_has_not_improved_and_keeps_the_best_epoch(tmp_path, losses, epochs, best):
    final, figures, weights = fit(tmp_path, losses)
    assert len(weights) == epochs and same(final, weights[best - 1]) and figures["best_epoch"] == best
    assert figures["steps"] == 4 * epochs
    assert [entry["validation"] for entry in figures["curve"]] == losses[:epochs]


@pytest.mark.parametrize(
    ("stops", "losses", "optim"),
    [
        ((0,), LOSSES, "adamw"),
        ((4, 5, 7), LOSSES, "adamw"),
        ((2, 2, 9), LOSSES, "adamw"),
        ((15,), LOSSES, "adamw"),
        ((9,), [None] * 6, "adamw"),  # the last weights count, with moments of all updates
        ((9,), [None] * 6, "adamw8bit"),
    ],
)
def test_a_stopped_run_ends_with_the_weights_and_the_log_of_one_that_was_not(tmp_path, stops, losses, optim):
    if optim != "adamw":
        pytest.importorskip("bitsandbytes")
    expected, figures, _ = fit(tmp_path / "one", losses, optim=optim)
    for stop in stops:
        with pytest.raises(Stopped):
            fit(tmp_path / "parts", losses, stop, save_every=3, optim=optim)
    for epochs in (True, False):  # at last as if stopped between the last epoch and the end of the stage
        final, again, weights = fit(tmp_path / "parts", losses, save_every=3, optim=optim)
        assert same(final, expected) and again == figures and bool(weights) == epochs
    logs = [list(read_jsonl(tmp_path / name / "model.log.jsonl")) for name in ("one", "parts")]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0] if "lr" in line] == list(range(1, figures["steps"] + 1))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("one"), LOSSES)


def stopped(folder: Path, stop: int = 9, **more: object) -> Path:
    """A training that was stopped; returns its last state."""
    with pytest.raises(Stopped):
        fit(folder, LOSSES, stop, save_every=3, **more)
    return folder / "model.parts" / "last.safetensors"


def log_of(state: Path) -> list[dict]:
    with safe_open(state, "pt") as file:
        return json.loads(file.metadata()["log"])


def test_a_stop_in_the_midst_of_a_state_loses_nothing(tmp_path, unbroken):
    last = stopped(tmp_path)
    last.with_name(".last.safetensors.draft0").write_bytes(last.read_bytes()[:1000])
    final, figures, weights = fit(tmp_path, LOSSES, save_every=3)
    assert same(final, unbroken[0]) and figures == unbroken[1] and len(weights) == 2
    assert {file.name for file in last.parent.iterdir()} == {"last.safetensors", "best.safetensors"}


class Evil:
    """A pickle that makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return Path.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["last.safetensors", ".metadata", "last"])
def test_a_state_of_somebody_else_runs_no_code(tmp_path, name):
    """A pickle in its place, or beside it, where torch's distributed checkpoints have theirs."""
    last = stopped(tmp_path)
    last.with_name(name).write_bytes(pickle.dumps(Evil(tmp_path / "struck")))
    pickle.loads(pickle.dumps(Evil(tmp_path / "loaded")))
    assert (tmp_path / "loaded").exists()
    if name == last.name:
        with pytest.raises(UserError, match=r"last\.safetensors can't be read"):
            fit(tmp_path, LOSSES)
    else:
        fit(tmp_path, LOSSES)
    assert not (tmp_path / "struck").exists()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def rewritten(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        tensors, log = load_file(file), {"log": json.dumps(log_of(file))}
        change(tensors)
        save_file(tensors, file, log)

    return spoil


LAYER, NORM = "model.layers.1.mlp.up_proj.weight ", "model.norm.weight "
SPOILT_STATES = [
    (cut, "not fully covered"),
    (rewritten(lambda tensors: tensors.pop(LAYER)), f"tensor {LAYER.strip()}"),  # layers renamed by a library
    (rewritten(lambda tensors: tensors.update({"model.old.weight exp_avg": torch.zeros(2)})), "'model.old.weight'"),
    (rewritten(lambda tensors: tensors.update({NORM: torch.zeros(2)})), "size"),
    (lambda file: save_file(load_file(file), file), "not subscriptable"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILT_STATES)
def test_a_state_that_is_cut_or_of_other_weights_is_refused_in_one_line(tmp_path, spoil, says):
    """A weight that it lacks would keep what it was at the start."""
    spoil(stopped(tmp_path))
    with pytest.raises(UserError, match=f"can't be read; delete .*model.parts to begin again: .*{says}") as error:
        fit(tmp_path, LOSSES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["last.safetensors", "model.log.jsonl"])
def test_a_full_disk_is_one_line_with_the_file_and_the_next_start_goes_on(tmp_path, file, monkeypatch, unbroken):
    stopped(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(UserError) as error:
        fill_the_disk(patch, file)
        fit(tmp_path, LOSSES)
    assert re.fullmatch(rf"{tmp_path}/\S*{file}: .*No space left on device.*", str(error.value))
    final, figures, _ = fit(tmp_path, LOSSES)
    assert same(final, unbroken[0]) and figures == unbroken[1]


def fill_the_disk(patch: pytest.MonkeyPatch, name: str) -> None:
    """A file of this name, or its draft, finds no room."""
    usual = open

    def save_full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def open_full(file, *args, **options):
        full = Path(file).name in (name, f".{name}.draft0")
        return usual("/dev/full" if full else file, *args, **options)

    if name.endswith(".safetensors"):
        patch.setattr("qlass.training.save_file", save_full)
    patch.setattr("builtins.open", open_full)


def test_a_complete_checkpoint_is_kept_and_overwriting_begins_anew(tmp_path, capsys):
    out, parts = tmp_path / "model", tmp_path / "model.parts"

    def begun(**more: object) -> Training:
        config = dataclasses.replace(SETTINGS, run=tmp_path, **more)
        log = Training(out, config, {}, {})
        log.lock.release()
        return log

    with pytest.raises(Stopped):
        fit(tmp_path, LOSSES, 5)
    assert not begun(save_every=9, micro_tokens=5).complete  # what rounds may differ
    with pytest.raises(UserError, match="was begun with lr"):
        begun(lr=0.2)
    begun(lr=0.2, overwrite=True)  # and stopped before its first state, which alone ends the older ones
    assert not begun().complete and (parts / "last.safetensors").exists()
    with pytest.raises(Stopped):
        fit(tmp_path, LOSSES, 5, lr=0.2, overwrite=True)
    lines = log_of(parts / "last.safetensors")
    rates = [line["lr"] for line in lines if "lr" in line]
    assert len(rates) == 4 and max(rates) == 0.2
    parts.rename(tmp_path / "other")
    out.mkdir()
    assert begun().complete and begun(overwrite=True).complete is False
    (tmp_path / "other").rename(parts)
    assert not begun(lr=0.2).complete  # the old one is there, the new one is being made
    assert "is complete; --overwrite trains it again" in capsys.readouterr().out


SPOILT = [
    (lambda loss: loss * math.nan, r"loss nan, gradient nan: .*lower --lr"),
    (lambda loss: loss + (loss - loss.detach()).sqrt(), r"loss \d.*, gradient (inf|nan): .*lower --lr"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILT)
def test_an_update_that_is_not_finite_stops_the_run_and_spoils_no_weights(tmp_path, spoil, says):
    with pytest.raises(UserError, match=says):
        fit(tmp_path, [1.0] * 6, spoil=spoil)
    lines = log_of(tmp_path / "model.parts" / "last.safetensors")
    assert [line["step"] for line in lines if "lr" in line][-1] == 4
    weights, _, _ = fit(tmp_path, [1.0] * 6)  # goes on
    assert all(p.isfinite().all() for p in weights)


class Copies(TorchDispatchMode):
    """The copies of matrices in bf16 that a block makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.dim() == 2:
            self.made.append(torch._C._WeakTensorRef(out))
        return out


def test_gradient_checkpointing_keeps_no_copy_of_the_weights_in_bf16():
    config = dataclasses.replace(SETTINGS, precision="bf16", gradient_checkpointing=True)
    model = tiny_lm(CHAT, tie_word_embeddings=False).train()
    models.prepare_training(model, config)
    with device.autocast(config), Copies() as copies:
        loss = sft.sft_loss(model, EXAMPLES)
    assert len(copies.made) == 15 and sum(not copy.expired() for copy in copies.made) == 1  # the output layer's
    assert loss.requires_grad


def test_moments_in_8_bits_are_not_divided(monkeypatch):
    monkeypatch.setattr("qlass.models.is_divided", lambda model: True)
    with pytest.raises(UserError, match="cannot divide its moments"):
        models.adamw([(tiny_lm(CHAT), 0.1)], "adamw8bit")


def launch(main, argv: list[str], code: int, n: int = 2) -> None:
    """As torchrun does: the same command in n processes, its rank in the environment."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(n)}
    started = [fork(main, argv, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank in range(n)]
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [code] * n


TRAININGS = [  # a stage, what it learns from and how, and the number of processes that go on
    ("sft", "--n-expert 5", 2),
    ("sft", "--expert {expert} --model {agent} --gradient-checkpointing", 3),  # whose output layer is tied
    ("sft", "--expert {expert} --model {agent} --lora 2", 2),
    ("train_qnet", "--preset paper --sft {agent} --labels {labels} --max-tokens 40 --lr 1e-3", 1),
    ("train_qnet", "--preset paper --sft {agent} --labels {labels} --max-tokens 40 --lora 2", 2),
]


@pytest.mark.parametrize(("stage", "flags", "n"), TRAININGS)
def test_processes_share_the_work_and_train_what_one_does(stage, flags, n, tmp_path, agent, fake_world, monkeypatch):
    """Also where they are stopped and started again."""
    labels, expert = tmp_path / "labels.jsonl", tmp_path / "mine.jsonl"
    labels.write_text(dump([node for i in range(5) for node in labelled_tree(f"train{i}")]))
    played = [demonstrate(FakeEnv(), f"train{i}") | {"env": "frozenlake"} for i in range(5)]
    expert.write_text(dump(played))
    common = f"--env frozenlake --run {tmp_path} --epochs 2 --micro-tokens 40 --batch 4 --save-every 1"
    argv = [*common.split(), *flags.format(agent=agent, labels=labels, expert=expert).split()]
    one, two = ([*argv, "--out", name] for name in ("by-1", "by-2"))
    main = importlib.import_module(stage).main
    main(one)
    end_update = Training.end_update

    def stopping(self: Training, *update, **figures) -> None:
        assert 0 < len(self.portions([*range(4)], lambda i: 9, 9)) < 4
        end_update(self, *update, **figures)
        if self.step == 3:
            raise SystemExit(7)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "end_update", stopping)
        launch(main, two, 7)
    launch(main, two, 0, n)
    alone, both = (meta_of(tmp_path / name) for name in ("by-1", "by-2"))
    losses = [[epoch["loss"] for epoch in meta["curve"]] for meta in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert alone["tokens"] == both["tokens"] and not (tmp_path / "by-2.parts").exists()
    for file in (tmp_path / "by-1").glob("*.safetensors"):
        mine, ours = load_file(file), load_file(tmp_path / "by-2" / file.name)
        for name, weight in mine.items():  # Adam makes a step of a gradient that is rounding alone
            far = (ours[name] - weight).abs()
            assert far.mean() < 1e-5 and far.max() < 1e-3, name
