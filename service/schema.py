"""What the service takes and gives: the bodies of its requests and answers, which its page at /docs shows."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DATA_FORMAT = {
    "format": "ZIP",
    "contents": {"main.csv": "UTF-8, columns images_path, question, answer", "images/": "the pictures"},
    "columns": {
        "images_path": "path of the picture, from the ZIP's root or from images/",
        "question": "what is asked, like «How many apples are in the picture?»",
        "answer": "a sentence with the right number, like «A photo of 5 apples», or the number alone",
    },
    "example": "images_path,question,answer\nimages/1.jpg,How many apples?,A photo of 5 apples\n",
    "notes": ["both may be one folder down", "PNG, JPEG, WebP and whatever else Pillow reads", "nothing is unpacked"],
}


class Strict(BaseModel):
    """Unknown fields are refused: a misspelt one would be passed over in silence."""

    model_config = ConfigDict(extra="forbid")


class TrainingConfig(Strict):
    """How a job trains. Completions of one update: batch_size x gradient_accumulation_steps, in groups of
    num_generations."""

    num_epochs: Annotated[int, Field(ge=1, le=1000)] = 50
    learning_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 5e-5
    batch_size: Annotated[int, Field(ge=1, le=32)] = 1
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=128)] = 8
    num_generations: Annotated[int, Field(ge=2, le=20)] = 8
    temperature: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] = 1.0
    use_4bit: bool = True
    max_image_size: Annotated[int, Field(ge=128, le=2048)] = 512
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 43


class LoraConfig(Strict):
    """The adapter. lora_dropout is written into the adapter's configuration and not applied: the sampler has none, and
    the policy would differ from what was sampled."""

    r: Annotated[int, Field(ge=1, le=512)] = 64
    lora_alpha: Annotated[int, Field(ge=1, le=512)] = 128
    lora_dropout: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.05


class TrainRequest(Strict):
    """A job to be trained."""

    job_name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]
    data_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    base_model_path: Annotated[str | None, Field(max_length=500)] = None
    training_config: TrainingConfig = TrainingConfig()
    lora_config: LoraConfig = LoraConfig()


class FileInfo(BaseModel):
    """An uploaded data set."""

    file_id: str
    filename: str
    upload_time: str
    csv_rows: int
    valid_images: int
    problems: list[str]


class JobInfo(BaseModel):
    """A job as it stands."""

    job_id: str
    job_name: str
    status: Literal["queued", "training", "completed", "failed", "cancelled"]
    progress: float
    current_step: int
    total_steps: int
    loss: float | None
    reward: float | None
    created_at: str
    error_message: str | None
    output_dir: str
    stopping: bool
    """it was cancelled and writes its checkpoint"""


class Started(BaseModel):
    """A job that was queued, cancelled or queued again."""

    job_id: str
    message: str
    status: str


class Answer(BaseModel):
    """What a trained model says to a picture."""

    answer: str
