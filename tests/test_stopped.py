"""Experiments that were stopped between two tasks: the same command makes what is missing, and the same files."""

import itertools

import pytest
from fakes import without_seconds

from experiments import compare, judges, tree_search
from experiments.qval import __main__ as qval
from qlass.outputs import Output

LAKE = "--env frozenlake --env-option map=random4 --preset paper"
COMMANDS = {
    compare: "--method random sample -M 2 --limit 3",
    judges: "--judge vote chance -M 2 --limit 3",
    tree_search: "--method beam -M 2 -k 2 --limit 3",
    qval: "--points 3 --scorers random code",
}


def lines_of(folder):
    return {path.name: without_seconds(path) for path in folder.rglob("*.jsonl")}


@pytest.mark.parametrize("experiment", COMMANDS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_stopped_experiment_goes_on_to_the_same_lines(experiment, agent, value_net, tmp_path, monkeypatch):
    write, played = Output.write, []

    def play(folder):
        qnet = f"--qnet {value_net}" if experiment is tree_search else ""
        experiment.main(f"{LAKE} --run {folder} --sft {agent} {qnet} {COMMANDS[experiment]}".split())

    def counted(self, groups, title, total, most=None):
        write(self, (played.append(title) or group for group in itertools.islice(groups, most)), title, total)
        if most:
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "write", counted)
    play("whole")
    number, played[:] = len(played), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, "write", lambda self, *words: counted(self, *words, most=1))
        play("stopped")
    play("stopped")
    assert len(played) == number >= 3
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole") != {}
    play("stopped")
    assert len(played) == number
