#!/usr/bin/env bash
# Set-up and recipes. Everything a recipe runs is printed first, so that it can be copied and changed.
#
#   ./run.sh           the demo: a tiny vision-language model learns to count shapes, on any machine, in minutes
#   ./run.sh digits    the same on scikit-learn's scanned handwritten digits
#   ./run.sh test      the test suite
#
# SEED=1 ./run.sh    another seed.  PYTHON=python3.12 ./run.sh    another interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")"
seed=${SEED:-0}
export TOKENIZERS_PARALLELISM=false

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { printf '+ %s\n' "$*"; "$@"; }

set_up() {  # .venv with the pinned requirements, once for each version of them
  local python=${PYTHON:-python3} stamp
  stamp=$(cksum < requirements.txt)
  [ "$(cat .venv/installed 2>/dev/null)" = "$stamp" ] && return
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "error: '$python' is missing or older than Python 3.11; name another: PYTHON=python3.12 ./run.sh" >&2; exit 2; }
  say "Setting up .venv (once, a minute or two)"
  "$python" -m venv .venv ||
    { echo "error: $python cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 2; }
  local quiet=--quiet
  [ -t 1 ] && quiet=  # pip's own progress bars, where somebody is watching
  .venv/bin/pip install --disable-pip-version-check $quiet --requirement requirements.txt
  echo "$stamp" > .venv/installed
}

demo() {  # folder under runs/, what tiny.py makes, task, then flags of grpo.py
  local run=runs/$1 kind=$2 tiny=runs/tiny/$2-$seed task=$3 tokens=64 suffix=
  shift 3
  [ "$kind" = digits ] && suffix=/data.jsonl
  say "1/4  A tiny Qwen2.5-VL and its data"
  show .venv/bin/python tiny.py --task "$kind" --seed "$seed" --output "$tiny"
  say "2/4  Before training, on held-out pictures"
  show .venv/bin/python evaluate.py --model "$tiny/model" --data "$tiny/test$suffix" --task "$task" \
    --max_tokens "$tokens" --output "$run/before"
  say "3/4  GRPO"
  show .venv/bin/python grpo.py --task "$task" --model "$tiny/model" --data "$tiny/train$suffix" \
    --eval_data "$tiny/test$suffix" --output "$run" --overwrite --seed "$seed" --max_completion_length "$tokens" "$@"
  say "4/4  After training, on the same held-out pictures"
  show .venv/bin/python evaluate.py --model "$run/final" --data "$tiny/test$suffix" --task "$task" \
    --max_tokens "$tokens" --output "$run/after"
  show .venv/bin/python report.py --run "$run" --before "$run/before" --after "$run/after"
}

recipe=${1:-demo}
case $recipe in
  demo)
    set_up
    demo demo count count --max_steps 60 --eval_every 5 --learning_rate 5e-5 --beta 0.02 ;;
  digits)
    set_up
    demo digits digits vqa --max_steps 50 --eval_every 10 --learning_rate 1e-4 --beta 0.02 ;;
  test)
    set_up
    shift
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/python -m pytest "$@" ;;
  *)
    echo "error: no recipe '$recipe'; there are: demo (the default), digits, test" >&2
    exit 2 ;;
esac
