# ./run.sh geo3k: geometry, scored on the 601 test rows of Geometry3K before and after training, as EasyR1 scores its
# baseline. The flags are in geo3k.flags.
data='' test_data=hiyouga/geometry3k@test
eval_flags=(--benchmark geometry3k --template recipes/geo3k.jinja --temperature 0.6 --top_p 0.95)

smoke_data() {
  data=$1/train.jsonl test_data=$1/test.jsonl
  smoke_flags+=(--min_pixels 3136 --max_pixels 7056)
}
