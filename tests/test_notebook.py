"""docs/qlass.ipynb: its cells run, and the pictures that it keeps are of such a run."""

import json
import sys
import types
from pathlib import Path

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "qlass.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_its_cells_run(tmp_path, monkeypatch):
    shown: list[str] = []
    display = types.ModuleType("IPython.display")
    display.SVG, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(version_info=(9,), get_ipython=lambda: None))
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")  # where Jupyter starts it
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plt, "show", lambda: shown.append("<figure"))
    space: dict = {}
    for cell in CELLS:
        text = "".join(cell["source"]).replace('"--epochs", "40"', '"--epochs", "2"')
        exec(text, space)
    plt.close("all")
    assert [picture.split()[0] for picture in shown] == ["<svg", "<svg", "<figure", "<svg"]
    assert f"step {len(space['steps'])}" in shown[-1] and space["of"]["qlass"]["steps"] == space["steps"]
