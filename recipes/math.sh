# ./run.sh math text|image|mixed: mathematics. If REWARD_MODEL_URL is set, it is the verifier model's address. The flags
# are in math.flags. Sourced by run.sh with $kind set to text, image or mixed.
case $kind in
  text) data=Skywork/Skywork-OR1-RL-Data@math ;;
  image) data=FanqingM/MMK12@train ;;
  mixed) data='' ;;  # both, as in math.flags
esac
test_data=''
eval_flags=(--n 8 --temperature 0.6)

if [ -z "${REWARD_MODEL_URL:-}" ]; then
  echo "REWARD_MODEL_URL is not set, so only the rule judges the answers. Start a verifier model, for example with" \
    "'vllm serve MODEL --port 8000', and set REWARD_MODEL_URL=http://localhost:8000/v1"
fi

smoke_data() {
  case $kind in text) data=$1/text.parquet ;; image) data=$1/image ;; mixed) data=$1/text.parquet,$1/image ;; esac
  smoke_flags+=(--overlong_buffer 8 --dynamic_sampling_rounds 2)
}
