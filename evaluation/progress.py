"""TODO evaluation/progress.py"""

import json
import pathlib
import sys
from typing import Any

from common import console, distributed, files


class EvalProgress:
    """What of an evaluation is done, in files beside its output, one for each process: a run broken off goes on."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any]):
        self.done: dict[int, dict] = {}
        if console.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            settings = json.loads(json.dumps(settings))
            own, parts = folder / "predictions.part-0", sorted(folder.glob("predictions.part-*"))
            for path in parts:
                head, *rows = files.read_jsonl(path) or [{}]
                if head == settings:
                    self.done |= {row.pop("place"): row for row in rows}
                    continue
                changed = [name for name in settings if head.get(name) != settings[name]]
                path.rename(aside := path.with_suffix(".aside"))
                print(
                    f"note: {aside} is of an evaluation with other {', '.join(changed)}: starting anew", file=sys.stderr
                )
            rows = [{"place": place} | row for place, row in self.done.items()]
            lines = "".join(json.dumps(row) + "\n" for row in [settings, *rows])
            (folder / "predictions.partial").write_text(lines, encoding="utf-8")
            (folder / "predictions.partial").rename(own)  # whole before the others go: a kill here loses nothing
            for path in parts:
                if path != own:
                    path.unlink(missing_ok=True)
            if self.done:
                print(f"going on after {len(self.done)} rows that were sampled before", file=sys.stderr)
        self.done = distributed.all_gather(self.done)[0]
        self.path = folder / f"predictions.part-{distributed.rank()}"
        if not console.is_main():
            self.path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def add(self, places: list[int], answered: list[dict]) -> None:
        """Append the rows at `places`."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"place": place} | row) + "\n" for place, row in zip(places, answered))

    def remove(self) -> None:
        """The evaluation is written: nothing is left to go on with."""
        self.path.unlink(missing_ok=True)
