"""The quickstart's notebook runs from its first cell to its last, and its model has learned."""

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from hybridrl.tracking import read_metrics

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.drill
def test_the_notebook_trains_a_model_that_shows_its_work(tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "quickstart"
    shutil.copytree(RECIPES / "quickstart", folder)
    notebook: Any = nbformat.read(folder / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    metrics = read_metrics(tmp_path / "outputs" / "notebook" / "train")
    assert metrics[1]["critic/rewards/mean"] < 0.5 < 0.75 < metrics[15]["critic/rewards/mean"]
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    said = "".join(output["text"] for output in last.outputs if output.get("name") == "stdout")
    assert said.endswith("\n#### 1255\n")


def test_the_notebook_is_kept_without_its_outputs() -> None:
    notebook: Any = nbformat.read(RECIPES / "quickstart" / "quickstart.ipynb", as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
