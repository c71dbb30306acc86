"""The request and response bodies of the service, which its API reference at /docs documents.

Requests with unknown fields are rejected, because a misspelt field would otherwise be ignored silently. The aliases are
the corresponding flags of grpo.py.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

MAX_FIELDS = 100


class RequestBody(BaseModel, extra="forbid"):  # type: ignore[call-arg]
    """The body of a request. Pydantic would take a second to list each of a hundred thousand unknown fields."""

    @model_validator(mode="before")
    @classmethod
    def limit_fields(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise ValueError(f"the object has {len(body)} fields; at most {MAX_FIELDS} are allowed")
        return body


class TrainingConfig(RequestBody):
    """Training settings. A step has batch_size x gradient_accumulation_steps completions, num_generations per row."""

    num_epochs: Annotated[int, Field(ge=1, le=1000, serialization_alias="epochs")] = 50
    learning_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 5e-5
    batch_size: Annotated[int, Field(ge=1, le=32)] = 1
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=128)] = 8
    num_generations: Annotated[int, Field(ge=2, le=20)] = 8
    temperature: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] = 1.0
    use_4bit: Annotated[bool, Field(serialization_alias="load_in_4bit")] = True
    max_image_size: Annotated[int, Field(ge=128, le=2048)] = 512  # the side of the square with as many pixels
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 43


class LoraConfig(RequestBody):
    """Settings of the adapter. lora_dropout acts in the updates only; the sampler has no dropout."""

    r: Annotated[int, Field(ge=1, le=512, serialization_alias="lora_rank")] = 64
    lora_alpha: Annotated[int, Field(ge=1, le=512)] = 128
    lora_dropout: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.05


class TrainRequest(RequestBody):
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
    status: Literal["training", "completed", "failed", "cancelled"]
    waiting: bool
    """Whether the job, whose status is `training`, waits for the jobs before it."""
    progress: float
    """Finished steps in percent."""
    current_step: int
    total_steps: int
    loss: float | None
    reward: float | None
    answers: int
    """How many answers the newest step has sampled; its `reward` is their mean score."""
    right_answers: int
    """How many of these have the full score."""
    held_out_rows: int = 0
    """How many rows are not trained on. The next two are the mean scores of the answers to them."""
    score_before: float | None = None
    score_after: float | None = None
    created_at: str
    """Time in UTC, without an offset, such as 2025-01-20T10:30:00."""
    error_message: str | None
    damage: str | None = None
    """Which files of the job are damaged, and where. The list of all jobs covers only the newest lines of each file."""
    output_dir: str
    stopping: bool
    """Whether the job was cancelled and is still saving its checkpoint."""


class Started(BaseModel):
    """The job after it was queued, cancelled or resumed."""

    job_id: str
    message: str
    status: Literal["training", "completed", "failed", "cancelled"]
    waiting: bool
    note: str | None = None
    """A default of this service that a caller may not expect."""
