# ./run.sh math text|image|mixed: Qwen2.5-VL-7B on mathematics. If REWARD_MODEL_URL is set, it is the verifier model's
# address.
# Sourced by run.sh with $kind set to text, image or mixed.
task=math
model=Qwen/Qwen2.5-VL-7B-Instruct
text=Skywork/Skywork-OR1-RL-Data@math
image=FanqingM/MMK12@train
case $kind in text) data=$text ;; image) data=$image ;; mixed) data=$text,$image ;; esac
test_data=''

eval_flags=(--n 8 --temperature 0.6)
# A step has 8 updates, so the warm-up of 80 updates takes 10 steps.
train_flags=(
  --skip_bad_rows --max_prompt_length 4096 --max_completion_length 8192 --overlong_buffer 2048
  --prompts_per_step 64 --prompts_per_update 8 --num_generations 16
  --learning_rate 1e-6 --warmup 80 --weight_decay 0.1
  --loss_type dapo --clip_low 0.2 --clip_high 0.28 --dynamic_sampling --dynamic_sampling_rounds 10
  --epochs 5 --save_every 20
)

if [ -z "${REWARD_MODEL_URL:-}" ]; then
  echo "REWARD_MODEL_URL is not set, so only the rule judges the answers. Start a verifier model, for example with" \
    "'vllm serve MODEL --port 8000', and set REWARD_MODEL_URL=http://localhost:8000/v1"
fi

smoke_data() {
  case $kind in text) data=$1/text.parquet ;; image) data=$1/image ;; mixed) data=$1/text.parquet,$1/image ;; esac
  smoke_flags+=(--overlong_buffer 8 --dynamic_sampling_rounds 2)
}
