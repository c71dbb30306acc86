#!/usr/bin/env bash
# Set-up and recipes. Everything a recipe runs is printed first, so that it can be copied and changed.
#
#   ./run.sh                          the demo: a tiny vision-language model learns to count shapes, anywhere, in minutes
#   ./run.sh digits                   the same on scikit-learn's scanned handwritten digits
#   ./run.sh vqa                      Qwen2.5-VL-3B on medical questions (VQA-RAD)
#   ./run.sh math text|image|mixed    Qwen2.5-VL-7B on mathematics, with a verifier model where REWARD_MODEL_URL names one
#   ./run.sh count                    Qwen2.5-VL-3B on object counting: an adapter beside 4-bit weights, on one small GPU
#   ./run.sh eval RUN [flags]         a trained run against its base, on its own task or with --benchmark NAME
#   ./run.sh serve [flags]            the counting service: upload, train, watch, download, over HTTP and on a page
#   ./run.sh test                     the test suite
#   ./run.sh setup                    only .venv, which all others make when it is missing; GPU=1 where this machine has
#                                     no GPU and those that train have; once, on one of them, before several train
#
# After vqa, math or count: --smoke runs it offline on generated rows with a tiny model, in a minute; flags of grpo.py
# that follow replace the recipe's. From the environment: MODEL, ADAPTER (an SFT adapter of MODEL to go on from), DATA,
# TEST_DATA (what to train, on what, and what to evaluate on), OUTPUT; N_GPUS=8 (processes), RESTARTS=3 (after a lost
# one); NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 (machines, which of them this is, the first one's address),
# MASTER_PORT; SEED=1 ./run.sh (another seed of the demos); PYTHON=python3.12 (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")"
seed=${SEED:-0}
export TOKENIZERS_PARALLELISM=false
unset RANK WORLD_SIZE  # a cluster's count machines; torchrun's, which the scripts go by, count processes

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { printf '+ %s\n' "$*"; "$@"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

number() {  # name of a variable of the environment, its least value, what it is when not given; 08 becomes 8
  local value=${!1:-$3}
  [[ $value =~ ^[0-9]{1,9}$ ]] && printf -v "$1" %d "$((10#$value))" && [ "${!1}" -ge "$2" ] ||
    fail "$1=$value: must be a whole number, $2 or more"
}

machines() {  # how many there are, and which one this is: with a mistake in it each would train alone
  [ -z "${NODE_RANK:-}" ] || [ -n "${NNODES:-}" ] ||
    fail "NODE_RANK=$NODE_RANK needs NNODES, the number of machines; where this is the only one: NNODES=1"
  number NNODES 1 1
  if [ "$NNODES" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] && [ -n "${NODE_RANK:-}" ] ||
      fail "NNODES=$NNODES needs MASTER_ADDR, the first machine's address, and NODE_RANK, this machine's number from 0"
    [[ $MASTER_ADDR != *:* ]] || fail "MASTER_ADDR=$MASTER_ADDR: must be the address alone; its port is MASTER_PORT"
    number MASTER_PORT 1 29400
  fi
  number NODE_RANK 0 0
  [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK: must be below NNODES=$NNODES: machines count from 0"
}

set_up() {  # .venv with the pinned requirements, once for each version of them; one for a GPU serves without one too
  local python=${PYTHON:-python3} gpu='GPU=1 ' file=requirements-gpu.txt stamp installed  # which brings vLLM
  installed=$(cat .venv/installed 2>/dev/null) || true
  stamp=$(cat requirements.txt $file | cksum)
  [ "$installed" != "$stamp" ] || return 0
  if [ "${GPU:-}" != 1 ] && ! nvidia-smi -L > /dev/null 2>&1; then
    gpu='' file=requirements.txt
    stamp=$(cksum < $file)
    [ "$installed" != "$stamp" ] || return 0
  fi
  [ "$NNODES" = 1 ] ||  # all of them would install at once, and into one folder where they share it
    fail ".venv is missing or not of these requirements; before NNODES=$NNODES, on one machine: ${gpu}./run.sh setup"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is missing or older than Python 3.11; name another: PYTHON=python3.12 ./run.sh"
  say "Setting up .venv (once, a minute or two)"
  "$python" -m venv .venv || fail "$python cannot make a virtual environment; on Debian: apt install python3-venv"
  local quiet=--quiet
  [ -t 1 ] && quiet=  # pip's own progress bars, where somebody is watching
  .venv/bin/pip install --disable-pip-version-check $quiet --requirement $file
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

train() {  # a recipe's grpo.py on every GPU of every machine
  local launch=(.venv/bin/python) restarts=(--max_restarts "$RESTARTS")
  if [ "$NNODES" -gt 1 ]; then
    # a store for each start: a machine that comes in place of a lost one finds none of the others' old ones
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    launch=(.venv/bin/torchrun --nnodes "$NNODES" --nproc_per_node "$N_GPUS" "${restarts[@]}" --rdzv_backend c10d
      --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_id grpo --rdzv_conf "is_host=$((NODE_RANK == 0))")
  elif [ "$N_GPUS" -gt 1 ]; then
    launch=(.venv/bin/torchrun --standalone --nproc_per_node "$N_GPUS" "${restarts[@]}")
  fi
  say "Training"
  show "${launch[@]}" grpo.py "$@"
}

recipe() {  # name, task, model, training data, test data ('' for none), flags of both scripts, flags of evaluate.py, --, of grpo.py
  local name=$1 task=$2 model=${MODEL:-$3} data=${DATA:-$4} test=${TEST_DATA-$5} both=() evaluation=() smoke=()
  local output=${OUTPUT:-runs/$name}
  shift 5
  while [ "$1" != -- ]; do both+=("$1"); shift; done
  shift
  while [ "$1" != -- ]; do evaluation+=("$1"); shift; done
  shift
  if [ -n "$tiny" ]; then
    output=runs/smoke/$name
    say "A tiny model and a few rows"
    show .venv/bin/python smoke.py --recipe "${name%%-*}" --output "$output/made"
    model=$output/made/model
    smoke=(--max_steps 2 --prompts_per_step 4 --prompts_per_update 2 --num_generations 4 --max_completion_length 32
      --overwrite)
    case $name in
      vqa) data=$output/made/train.jsonl test=$output/made/test.jsonl both=(--max_pixels 7056) ;;
      math-text) data=$output/made/text.parquet ;;
      math-image) data=$output/made/image ;;
      math-mixed) data=$output/made/text.parquet,$output/made/image ;;
      count) data=$output/made/train.zip test=$output/made/test.zip ;;
    esac
    case $name in math-*) smoke+=(--overlong_buffer 8 --dynamic_sampling_rounds 2) ;; esac
    evaluation+=(--max_tokens 32)
  fi
  both+=("${shared[@]}")
  [ -n "${ADAPTER:-}" ] && set -- --adapter "$ADAPTER" "$@"
  train --task "$task" --model "$model" --data "$data" --output "$output" "$@" "${smoke[@]}" "${both[@]}" "${given[@]}"
  [ -n "$test" ] && [ "$NODE_RANK" = 0 ] || return 0  # one machine evaluates
  local when what
  for when in before after; do
    say "Evaluation $when training"
    what=(--model "$model")
    if [ $when = before ]; then
      [ -n "${ADAPTER:-}" ] && what+=(--adapter "$ADAPTER")
    elif [ -f "$output/final/adapter_config.json" ]; then
      what+=(--adapter "$output/final")
    else
      what=(--model "$output/final")
    fi
    show .venv/bin/python evaluate.py --task "$task" "${what[@]}" --data "$test" \
      --output "$output/$when" "${both[@]}" "${evaluation[@]}"
  done
  show .venv/bin/python report.py --run "$output" --before "$output/before" --after "$output/after"
}

# Pictures above about 1.6 megapixels do not fit into 2048 tokens: --skip_bad_rows names them and goes on without.
vqa() {
  recipe vqa vqa Qwen/Qwen2.5-VL-3B-Instruct flaviagiammarino/vqa-rad@train flaviagiammarino/vqa-rad@test \
    --min_pixels 262144 --max_pixels 4194304 --skip_bad_rows -- \
    --temperature 0.6 --top_p 0.95 --max_tokens 1024 -- \
    --max_prompt_length 2048 --max_completion_length 1024 --prompts_per_step 128 --num_generations 4 \
    --prompts_per_update 64 --learning_rate 2e-6 --warmup 0.03 --beta 5e-3 --clip_low 0.2 --clip_high 0.3 --epochs 10 \
    --save_every 20
}

# A warm-up of 10 steps is 80 of their updates.
math() {
  local text=Skywork/Skywork-OR1-RL-Data@math image=FanqingM/MMK12@train data
  case $1 in text) data=$text ;; image) data=$image ;; mixed) data=$text,$image ;; esac
  if [ -z "${REWARD_MODEL_URL:-}" ]; then
    echo "no REWARD_MODEL_URL: answers are judged by the rule alone. A verifier model is started, for example, with" \
      "'vllm serve MODEL --port 8000', then REWARD_MODEL_URL=http://localhost:8000/v1"
  fi
  recipe "math-$1" math Qwen/Qwen2.5-VL-7B-Instruct "$data" "" --skip_bad_rows --max_prompt_length 4096 -- \
    --n 8 --temperature 0.6 --max_tokens 8192 -- \
    --max_completion_length 8192 --prompts_per_step 64 --num_generations 16 \
    --prompts_per_update 8 --learning_rate 1e-6 --warmup 80 --loss_type dapo --clip_low 0.2 --clip_high 0.28 \
    --overlong_buffer 2048 --dynamic_sampling --dynamic_sampling_rounds 10 --weight_decay 0.1 --epochs 5 \
    --save_every 20
}

count() {
  local adapter=(--lora_rank 16)
  [ -n "${ADAPTER:-}" ] && adapter=()  # which has a rank of its own
  recipe count count Qwen/Qwen2.5-VL-3B-Instruct "" "" --max_side 512 -- --max_tokens 256 -- \
    --max_completion_length 256 --prompts_per_step 8 --num_generations 8 --learning_rate 5e-5 --epochs 50 --seed 43 \
    "${adapter[@]}" --load_in_4bit --vllm_memory 0.55 --save_every 50
}

run_flags() {  # what a run was trained on and with, as flags of evaluate.py, one a line
  .venv/bin/python - "$1" "${TEST_DATA:-}" "${*:2}" <<'PY'
import json, pathlib, sys
run, test, given = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if not (run / "final").is_dir():
    sys.exit(f"error: {str(run)!r} holds no trained model: give the folder of a finished run (grpo.py --output)")
config = json.loads((run / "config.json").read_text())
adapter = (run / "final" / "adapter_config.json").is_file()
flags = {"model": config["model"] if adapter else f"{run}/final", "baseline": config["model"]}
if adapter:
    flags |= {"adapter": f"{run}/final", "baseline": config.get("adapter") or config["model"]}
if "--benchmark" not in given:
    after = run / "after" / "scores.json"  # where a recipe's evaluation says what it scored
    data = test or config["eval_data"] or (json.loads(after.read_text())["data"] if after.is_file() else None)
    if data is None:
        sys.exit("error: the run has no eval_data: TEST_DATA=FILE ./run.sh eval RUN, or --benchmark NAME")
    flags |= {"task": config["task"], "data": data}
    same = ("image_dir", "prompt_column", "answer_column", "image_column", "template", "reward")
    flags |= {name: config[name] for name in same if config.get(name)}
same = ("min_pixels", "max_pixels", "max_side", "max_prompt_length", "vllm_memory", "tensor_parallel", "engine")
same += ("verifier_url", "verifier_model", "skip_bad_rows")
flags |= {name: config[name] for name in same if config.get(name) is not None} | {"max_tokens": config["max_completion_length"]}
for name, value in flags.items():
    for one in value if isinstance(value, list) else [value]:
        if one is not False:
            print(f"--{name}" if one is True else f"--{name}={one}")
PY
}

against_base() {  # folder of a run, then flags of evaluate.py
  local run=${1:-} flags launch=(.venv/bin/python)
  [ -n "$run" ] && shift || fail "./run.sh eval needs the folder of a run: ./run.sh eval runs/vqa"
  flags=$(run_flags "$run" "$@") || exit 2
  mapfile -t flags <<< "$flags"
  [ "$N_GPUS" -gt 1 ] && launch=(.venv/bin/torchrun --standalone --nproc_per_node "$N_GPUS" --)
  show "${launch[@]}" evaluate.py "${flags[@]}" --output "${OUTPUT:-$run/eval}" "$@"
  say "The same model under lmms-eval (pip install lmms-eval, in an environment of its own with vLLM and transformers 5):"
  local model=$run/final
  if [ -f "$run/final/adapter_config.json" ]; then
    model=$run/merged
    echo "  .venv/bin/python merge_lora.py --base_model BASE --lora_model $run/final --output_path $model"
  fi
  echo "  lmms-eval --model vllm --tasks mme,mmstar --batch_size 64 --process-docs-parallel 1 --log_samples --output_path $run/lmms-eval \\"
  echo "    --model_args 'model=$model,dtype=bfloat16,max_model_len=32768,max_new_tokens=2048,mm_processor_kwargs={\"min_pixels\":3136,\"max_pixels\":1003520}'"
}

recipe=${1:-demo}
[ $# -gt 0 ] && shift
number N_GPUS 1 1
number RESTARTS 0 0
case $recipe in vqa | math | count) machines ;; *) NNODES=1 ;; esac
if [ "$recipe" = eval ]; then
  set_up
  against_base "$@"
  exit
elif [ "$recipe" = serve ]; then
  set_up
  show .venv/bin/python serve.py "$@"
  exit
fi
tiny='' given=() kind=
if [ "$recipe" = math ]; then
  kind=${1:-}
  case $kind in
    text | image | mixed) shift ;;
    *) fail "./run.sh math needs text, image or mixed after it, not '$kind'" ;;
  esac
fi
shared=()  # of the given flags those about pictures, rows and rewards, which evaluation needs too
part=given
for flag in "$@"; do
  case $flag in
    --smoke)
      [ "$NNODES" = 1 ] || fail "--smoke with NNODES=$NNODES: it makes its own model and rows, on one machine"
      tiny=yes
      continue ;;
    --output* | --model* | --adapter* | --data | --data=*)
      fail "$flag: set OUTPUT, MODEL, ADAPTER or DATA in the environment, so that training and evaluation agree" ;;
    --*pixels* | --max_side* | --image_dir* | --*_column* | --template* | --skip_bad_rows | --max_prompt_length* | \
      --reward* | --verifier* | --engine* | --vllm* | --tensor_parallel*) part=shared ;;
    --*) part=given ;;
  esac
  [ $part = shared ] && shared+=("$flag") || given+=("$flag")
done
if [ "$recipe" = count ] && [ -z "$tiny" ] && [ -z "${DATA:-}" ]; then
  fail "./run.sh count has no data of its own: DATA=folder_or.zip ./run.sh count (main.csv beside images/)"
fi
case $recipe in
  demo)
    set_up
    demo demo count count --max_steps 60 --eval_every 5 --learning_rate 5e-5 --beta 0.02 "${given[@]}" ;;
  digits)
    set_up
    demo digits digits vqa --max_steps 50 --eval_every 10 --learning_rate 1e-4 --beta 0.02 "${given[@]}" ;;
  vqa | count)
    set_up
    "$recipe" ;;
  math)
    set_up
    math "$kind" ;;
  test)
    set_up
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto "${given[@]}" ;;
  setup)
    set_up
    echo ".venv is ready" ;;
  *) fail "no recipe '$recipe'; there are: demo (the default), digits, vqa, math, count, eval, serve, test, setup" ;;
esac
