"""The pages of a run, with its curves and sampled completions, and what W&B, TensorBoard and trackio get of them.

Imports the core, and no torch. Start reading at `report.py`: a run's log calls its `Pages`, and the functions draw.
`trackers.py` is for `--log_to`. `python -m parts.pages --run runs/x` draws the pages again.
"""

from parts.pages.report import Pages, is_group, write_index, write_pages

__all__ = ["Pages", "is_group", "write_index", "write_pages"]
