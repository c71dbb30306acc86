"""What a run was trained on and with, as flags of evaluate.py, one a line; `./run.sh eval RUN` calls it.

python -m evaluation.run_flags runs/vqa '' --benchmark mmstar
"""

import json
import pathlib
import sys
from typing import Any

ROWS = ("image_dir", "prompt_column", "answer_column", "image_column", "template", "reward")
ANY = ("min_pixels", "max_pixels", "max_side", "max_prompt_length", "vllm_memory", "tensor_parallel", "engine")
ANY += ("verifier_url", "verifier_model", "skip_bad_rows")


def run_flags(run: pathlib.Path, test_data: str, benchmark: bool) -> dict[str, Any]:
    """The flags that score the model in the folder `run` against its base, on `test_data`, else on the rows that the
    run itself was scored on, unless on a `benchmark`. Exits with one line when they cannot be told."""
    if not (run / "final").is_dir():
        sys.exit(f"error: {str(run)!r} holds no trained model: give the folder of a finished run (grpo.py --output)")
    config = json.loads((run / "config.json").read_text())
    flags = {"model": f"{run}/final", "baseline": config["model"]}
    if (run / "final" / "adapter_config.json").is_file():
        flags = {"model": config["model"], "baseline": config.get("adapter") or config["model"]}
        flags["adapter"] = f"{run}/final"
    if not benchmark:
        flags |= {"task": config["task"], "data": test_data or _scored_rows(run, config)}
        flags |= {name: config[name] for name in ROWS if config.get(name)}
    flags |= {name: config[name] for name in ANY if config.get(name) is not None}
    return flags | {"max_tokens": config["max_completion_length"]}


def _scored_rows(run: pathlib.Path, config: dict[str, Any]) -> str:
    """The held-out rows of a run: its own, or those that its recipe evaluated it on."""
    after = run / "after" / "scores.json"
    data = config["eval_data"] or (json.loads(after.read_text())["data"] if after.is_file() else None)
    if data is None:
        sys.exit("error: the run has no eval_data: TEST_DATA=FILE ./run.sh eval RUN, or --benchmark NAME")
    return data


def main(run: str, test_data: str, *given: str) -> None:
    benchmark = any(flag == "--benchmark" or flag.startswith("--benchmark=") for flag in given)
    for name, value in run_flags(pathlib.Path(run), test_data, benchmark).items():
        for one in value if isinstance(value, list) else [value]:
            if one is not False:
                print(f"--{name}" if one is True else f"--{name}={one}")


if __name__ == "__main__":
    main(*sys.argv[1:])
