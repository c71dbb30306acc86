"""Progress files of an evaluation, which let the same command resume after an interruption.

Each process appends its outputs to `predictions.part-RANK` in the output folder. The first line of the file holds the
settings. Every other line holds the output for one row, with the row's index as `place`. The files are deleted once the
results are written.
"""

import json
import pathlib
import sys
from typing import Any

from common import console, distributed, files


class EvalProgress:
    """The outputs of an unfinished evaluation; `done` maps row indices to the outputs sampled by earlier attempts.

    Outputs sampled with different `settings` are not reused: their file is renamed to `*.aside`.
    """

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any]):
        self.done: dict[int, dict] = {}
        if console.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            settings = json.loads(json.dumps(settings))
            main_path, paths = folder / "predictions.part-0", sorted(folder.glob("predictions.part-*"))
            for path in paths:
                saved_settings, *rows = files.read_jsonl(path) or [{}]
                if saved_settings == settings:
                    self.done |= {row.pop("place"): row for row in rows}
                    continue
                changed = [name for name in settings if saved_settings.get(name) != settings[name]]
                aside = path.with_suffix(".aside")
                path.rename(aside)
                print(
                    f"note: {aside} is from an evaluation with different {', '.join(changed)}; starting over",
                    file=sys.stderr,
                )
            rows = [{"place": index} | row for index, row in self.done.items()]
            lines = "".join(json.dumps(row) + "\n" for row in [settings, *rows])
            # The merged file is complete before the old files are deleted, so a kill at this point loses nothing.
            (folder / "predictions.partial").write_text(lines, encoding="utf-8")
            (folder / "predictions.partial").rename(main_path)
            for path in paths:
                if path != main_path:
                    path.unlink(missing_ok=True)
            if self.done:
                print(f"resuming: {len(self.done)} rows are already sampled", file=sys.stderr)
        self.done = distributed.all_gather(self.done)[0]
        self.path = folder / f"predictions.part-{distributed.rank()}"
        if not console.is_main():
            self.path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def add(self, indices: list[int], outputs: list[dict]) -> None:
        """Append the outputs for the rows with these indices."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"place": index} | output) + "\n" for index, output in zip(indices, outputs))

    def remove(self) -> None:
        """Delete this process's file. Call it once the results are written."""
        self.path.unlink(missing_ok=True)
