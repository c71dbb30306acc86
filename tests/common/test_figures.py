"""Figures go to files, whatever the environment says of displays."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
DRAW = """
import pathlib, sys
from common.figures import save_figure
import matplotlib.pyplot as plt
save_figure(plt.subplots()[0], pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("backend", ["nosuch", "", "module://nowhere.backend", "TkAgg", "agg\n", "7"])
def test_a_figure_needs_no_backend_of_the_environment(backend, tmp_path):
    environment = os.environ | {"MPLBACKEND": backend, "DISPLAY": ":99"}
    subprocess.run([sys.executable, "-c", DRAW, tmp_path / "a.png"], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
