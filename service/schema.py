"""The request and response bodies of the service, which its API reference at /docs documents."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Base class that rejects unknown fields: otherwise, a misspelt field would be ignored silently."""

    model_config = ConfigDict(extra="forbid")


class TrainingConfig(Strict):
    """Training settings of a job.

    One update uses batch_size x gradient_accumulation_steps completions, in groups of num_generations per question.
    """

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
    """Settings of the LoRA adapter.

    lora_dropout is written to the adapter's configuration but not applied in training. The sampler has no dropout, so
    with dropout the trained policy would differ from the policy that sampled.
    """

    r: Annotated[int, Field(ge=1, le=512)] = 64
    lora_alpha: Annotated[int, Field(ge=1, le=512)] = 128
    lora_dropout: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.05


class TrainRequest(Strict):
    """A new job."""

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
    """A job and its progress."""

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
    """Whether the job was cancelled and is still saving its checkpoint."""


class Started(BaseModel):
    """The job after it was queued, cancelled or resumed."""

    job_id: str
    message: str
    status: str
