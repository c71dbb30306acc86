# ./run.sh clevr: questions about drawn solids, with the settings of a nightly test of NeMo-RL, scored on 256 rows of the
# same kind before and after training. The flags are in clevr.flags. Sourced by run.sh.
data='' test_data=MMInstruction/Clevr_CoGenT_ValA@train
eval_flags=(--temperature 1 --limit 256)

echo "Expected: a mean reward above 0.9 at step 200, which NeMo-RL's nightly test demands (github.com/NVIDIA-NeMo/RL)." \
  "This recipe has not been run on real weights"

smoke_data() {
  data=$1/train.jsonl test_data=$1/test.jsonl
  smoke_flags+=(--min_pixels 3136 --max_pixels 7056)
}
