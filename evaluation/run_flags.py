"""Print, one per line, the flags with which evaluate.py scores a trained run. `./run.sh eval RUN` calls this module.

    python -m evaluation.run_flags runs/vqa '' --benchmark mmstar

The arguments are the run's folder, the test data (may be empty) and the user's own flags for evaluate.py.
"""

import json
import pathlib
import sys
from typing import Any

TASK_FLAGS = ("image_dir", "prompt_column", "answer_column", "image_column", "template", "reward")
COMMON_FLAGS = ("min_pixels", "max_pixels", "max_side", "max_prompt_length", "vllm_memory", "tensor_parallel", "engine")
COMMON_FLAGS += ("max_megapixels", "verifier_url", "verifier_model", "verifier_template")
COMMON_FLAGS += ("skip_bad_rows", "chat_template_kwargs")


def run_flags(run: pathlib.Path, test_data: str, benchmark: bool) -> dict[str, Any]:
    """Return the flags that score the trained model in `run` against its base model.

    Without a `benchmark`, the rows are `test_data` or, if that is empty, the run's own held-out rows. Exits with a
    one-line error if `run` holds no trained model or if there are no rows to score on.
    """
    if not (run / "final").is_dir():
        sys.exit(f"error: {str(run)!r} holds no trained model: give the folder of a finished run (grpo.py --output)")
    config = json.loads((run / "config.json").read_text())
    flags = {"model": f"{run}/final", "baseline": config["model"]}
    if (run / "final" / "adapter_config.json").is_file():
        flags = {"model": config["model"], "baseline": config.get("adapter") or config["model"]}
        flags["adapter"] = f"{run}/final"
    if not benchmark:
        recipe_scores = run / "eval" / "scores.json"  # written by the evaluation at the end of a recipe
        data = test_data or config["eval_data"]
        if not data and recipe_scores.is_file():
            data = json.loads(recipe_scores.read_text())["data"]
        if not data:
            sys.exit("error: the run has no eval_data; use TEST_DATA=FILE ./run.sh eval RUN, or --benchmark NAME")
        flags |= {"task": config["task"], "data": data}
        flags |= {name: config[name] for name in TASK_FLAGS if config.get(name)}
    flags |= {name: config[name] for name in COMMON_FLAGS if config.get(name) is not None}
    if flags.get("engine") == "policy":  # for training only
        del flags["engine"]
    return flags | {"max_tokens": config["max_completion_length"]}


def main(run: str, test_data: str, *user_flags: str) -> None:
    benchmark = any(flag.partition("=")[0] == "--benchmark" for flag in user_flags)
    for name, value in run_flags(pathlib.Path(run), test_data, benchmark).items():
        for item in value if isinstance(value, list) else [value]:
            if item is not False:
                print(f"--{name}" if item is True else f"--{name}={item}")


if __name__ == "__main__":
    main(*sys.argv[1:])
