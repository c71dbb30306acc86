"""Clients of the counting service as others have written them: the documented Python client and calls of curl."""

import json
import pathlib
import subprocess

DOCUMENTED = """
import requests

with open('training_data.zip', 'rb') as f:
    response = requests.post('http://localhost:8000/upload-data', files={'file': f})
file_id = response.json()['file_id']

response = requests.post('http://localhost:8000/train', json={
    "job_name": "apple_counting_model",
    "data_file_id": file_id,
    "training_config": {"num_epochs": 30, "learning_rate": 5e-5, "batch_size": 1}
})
job_id = response.json()['job_id']

status = requests.get(f'http://localhost:8000/jobs/{job_id}').json()
"""

NINE_ENDPOINTS = """
set -euo pipefail
url=$1 archive=$2 completed_job=$3
call() { curl --silent --show-error --fail --max-time 60 "$@"; }
field() { python3 -c "import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])" "$@"; }
json='Content-Type: application/json'

call "$url/" > basics.json
call "$url/data-format" > format.json
call -X POST "$url/upload-data" -F "file=@$archive" > file.json
call "$url/files" > files.json
body="{\\"job_name\\": \\"apples\\", \\"data_file_id\\": \\"$(field file.json file_id)\\"}"
call -X POST "$url/train" -H "$json" -d "$body" > started.json
job=$(field started.json job_id)
call "$url/jobs" > jobs.json
call "$url/jobs/$job" > job.json
call -X DELETE "$url/jobs/$job" > cancelled.json
call "$url/jobs/$completed_job/download" -o result.zip
"""


def run_documented_client(port: int, archive: bytes, folder: pathlib.Path, monkeypatch) -> dict:
    """Run the documented client in `folder` against the service at `port`. Return its variables."""
    (folder / "training_data.zip").write_bytes(archive)
    monkeypatch.chdir(folder)
    variables: dict = {}
    exec(DOCUMENTED.replace("localhost:8000", f"localhost:{port}"), variables)
    return variables


def call_nine_endpoints(url: str, archive: bytes, completed_job: str, folder: pathlib.Path) -> dict[str, object]:
    """Call each documented endpoint with curl. Return the JSON responses, by the name of their file."""
    (folder / "data.zip").write_bytes(archive)
    command = ["bash", "-c", NINE_ENDPOINTS, "bash", url, "data.zip", completed_job]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
