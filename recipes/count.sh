# ./run.sh count: Qwen2.5-VL-3B on object counting, with an adapter on top of 4-bit weights, on one small GPU.
task=count
model=Qwen/Qwen2.5-VL-3B-Instruct
data=''  # set by the user: DATA=folder_or.zip
test_data=''

train_flags=(
  --max_side 512
  --max_completion_length 256 --prompts_per_step 8 --num_generations 8
  --learning_rate 5e-5 --epochs 50 --seed 43
  --load_in_4bit --vllm_memory 0.55 --save_every 50
)
[ -n "${ADAPTER:-}" ] || train_flags+=(--lora_rank 64 --lora_alpha 128)  # an existing adapter keeps its own rank

smoke_data() {
  data=$1/train.zip test_data=$1/test.zip
}
