# ./run.sh count: object counting. The user sets the data: DATA=folder_or.zip. The flags are in count.flags.
data='' test_data=''

smoke_data() {
  data=$1/train.zip test_data=$1/test.zip
}
